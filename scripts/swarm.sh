#!/bin/sh
# scripts/swarm.sh [SEEDS [PIECE]]: random worlds with seeds 0 to SEEDS, in pieces of PIECE. It can be stopped at any
# time and resumes: finished pieces are recorded in $OUT/swarm/pieces, and are valid for the same commit. Everything
# runs at the lowest priority. Exits with status 1 at the first piece with a violation; its smallest failing scenario
# is then in $OUT/swarm.
set -eu
cd "$(dirname "$0")/.."

seeds=${1:-1000000}
piece=${2:-10000}
target=${CARGO_TARGET_DIR:-target}
out=${OUT:-out}/swarm
mkdir -p "$out/pieces"

cargo build --profile swarm --locked -p bifrost-sim --features mutations
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
first=0
while [ "$first" -lt "$seeds" ]; do
    end=$((first + piece))
    [ "$end" -le "$seeds" ] || end=$seeds
    done=$out/pieces/$commit-$first-$end.json
    if [ ! -e "$done" ]; then
        if ! nice -n 19 "$target/swarm/bifrost-sim" swarm --seeds "$first..$end" --json --keep "$out" >"$done.part"; then
            echo "== violation between seeds $first and $end: $done.part" >&2
            exit 1
        fi
        mv "$done.part" "$done"
    fi
    echo "== $end of $seeds seeds"
    first=$end
done
echo "== $seeds seeds, no violation"
