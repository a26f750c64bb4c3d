#!/bin/sh
# Counts instructions and bytes of the transport, and fails if a bar is missed: docs/COST.md. Arguments go to
# `bifrost-cost`: --json prints JSON; --accept makes the counts the new baseline.
set -eu
cd "$(dirname "$0")/.."

# Absolute, because benchmarks run in their package's directory.
mkdir -p "${CARGO_TARGET_DIR:-target}" "${OUT:-out}/cost"
target=$(cd "${CARGO_TARGET_DIR:-target}" && pwd)
out=$(cd "${OUT:-out}/cost" && pwd)

# Features of dependencies are resolved for the whole workspace, as in all other builds, so that none is built twice.
cargo build --quiet --locked --workspace --features bifrost-bench/runner --bin gungraun-runner
rm -rf "$out/counts"
# The harness writes to a file; its output matters only if it fails. This also builds bifrost-cost.
status=0
GUNGRAUN_RUNNER="$target/debug/gungraun-runner" GUNGRAUN_HOME="$out/counts" GUNGRAUN_COLOR=never \
    cargo bench --quiet --locked --workspace --bench instructions -- --save-summary=json \
    >"$out/counts.log" 2>&1 || status=$?
if [ "$status" -ne 0 ]; then
    cat "$out/counts.log" >&2
    echo "cost.sh: counting instructions failed with status $status" >&2
    exit 1
fi
"$target/release/bifrost-cost" --counts "$out/counts/bifrost-bench/instructions/cost" \
    --baseline crates/bench/baseline.toml --out "$out/cost.json" "$@"
