#!/bin/sh
# Counts instructions and bytes of the transport, and fails if a bar is missed: docs/COST.md. Arguments go to
# `bifrost-cost`: --json prints JSON; --accept makes what is counted the baseline.
set -eu
cd "$(dirname "$0")/.."

# Absolute, since benchmarks run in their package's directory.
mkdir -p "${CARGO_TARGET_DIR:-target}" "${OUT:-out}/cost"
target=$(cd "${CARGO_TARGET_DIR:-target}" && pwd)
out=$(cd "${OUT:-out}/cost" && pwd)

# The whole workspace chooses the features of dependencies, as for everything else that is built, so that none is built twice.
cargo build --quiet --locked --workspace --features bifrost-bench/runner --bin gungraun-runner
rm -rf "$out/counts"
# The harness reports to a file; its own output matters only when it fails. With the benchmark, bifrost-cost is built.
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
