#!/bin/sh
# Coverage-guided fuzzing that keeps its corpus: scripts/fuzz.sh [SECONDS [TARGET…]]; default: 60 seconds, all
# targets.
# Needs a C++ compiler for libFuzzer, and nothing else: the coverage instrumentation is in the pinned toolchain.
#
# Inputs that libFuzzer finds stay in out/fuzz/TARGET, and the next run uses them; a failure leaves its input in
# out/fuzz/failures. `scripts/fuzz.sh minimise` then puts the smallest set of inputs with the same coverage into the
# corpus.
set -eu
cd "$(dirname "$0")/.."

seconds=60
minimise=""
case "${1:-}" in
minimise) minimise=yes; shift ;;
[0-9]*) seconds=$1; shift ;;
esac

# A separate target directory, because every crate is built with instrumentation.
target=${CARGO_TARGET_DIR:-target}/fuzz
pass="-Cpasses=sancov-module"
for option in level=4 inline-8bit-counters pc-table trace-compares; do
    pass="$pass -Cllvm-args=-sanitizer-coverage-$option"
done
triple=$(rustc -vV | sed -n 's/^host: //p')
# With --target, build scripts and procedural macros are not instrumented. Overflow is checked as in tests.
RUSTFLAGS="$pass -Cdebug-assertions -Coverflow-checks -Ccodegen-units=1" \
    cargo build --locked --release --target "$triple" --target-dir "$target" \
    -p bifrost-fuzz --bin fuzz --features libfuzzer,mutations --config profile.release.lto=false
fuzz=$target/$triple/release/fuzz

out=${OUT:-out}/fuzz
mkdir -p "$out/failures"
names=${*:-$(ls crates/fuzz/corpus)}
failed=""
for name in $names; do
    corpus=crates/fuzz/corpus/$name
    mkdir -p "$out/$name" "$corpus"
    longest=$(sed -n "s/.*name: \"$name\", max_len: \([0-9]*\),.*/\1/p" crates/fuzz/src/lib.rs)
    if [ -n "$minimise" ]; then
        rm -rf "$out/$name.min"
        mkdir "$out/$name.min"
        FUZZ_TARGET=$name "$fuzz" -merge=1 -max_len="$longest" "$out/$name.min" "$corpus" "$out/$name" >/dev/null 2>&1
        echo "== $name: $(ls "$out/$name.min" | wc -l) inputs, $(du -bs "$out/$name.min" | cut -f1) bytes in $out/$name.min"
        continue
    fi
    echo "== $name, $seconds s"
    FUZZ_TARGET=$name "$fuzz" -max_total_time="$seconds" -max_len="$longest" -timeout=20 -rss_limit_mb=3000 \
        -print_final_stats=1 -verbosity=0 -artifact_prefix="$out/failures/$name-" "$out/$name" "$corpus" || failed="$failed $name"
done
if [ -n "$failed" ]; then
    echo "== failed:$failed; the inputs are in $out/failures. To see one fail:" >&2
    echo "   cargo run -p bifrost-fuzz --features mutations --example replay TARGET FILE" >&2
    exit 1
fi
