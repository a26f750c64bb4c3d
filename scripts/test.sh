#!/bin/sh
# Everything that must hold, in order, with a line of progress for every step. `make test` and `.ci/run` call it.
set -eu
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
out=${OUT:-out}/test
sudo=""
[ "$(id -u)" -eq 0 ] || sudo=sudo
began=$(date +%s)
number=0
total=17

step() {
    title=$1
    shift
    number=$((number + 1))
    echo "== [$number/$total] $(($(date +%s) - began)) s: $title"
    if ! "$@"; then
        echo "== failed after $(($(date +%s) - began)) s: $title" >&2
        exit 1
    fi
}

# An experiment, then its bars. Without the transport they are missed by factors of fifty and more; here, in short runs on
# a machine that may be busy with something else, they pass within a factor, the first argument. `make bench` judges
# without one. The tail of Redis needs most: the kernel's 200 ms are divided by a few milliseconds, in which queues for a
# processor that others use, too, count in full.
end_to_end() {
    slack=$1
    name=$2
    results="$out/$2-$3"
    shift 3
    $sudo "$target/release/bifrost-lab" run "$name" --quick --out "$results" "$@" &&
        "$target/release/bifrost-lab" check "$name" --slack "$slack" --out "$results" &&
        [ -z "$(ip netns list | grep '^bl[0-9]*x' || true)" ]
}

step "Debian packages" $sudo scripts/install-debian-packages.sh
step "formatting" cargo fmt --all --check
step "lints" cargo clippy --workspace --all-targets --locked -- -D warnings
step "documentation" env RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked
step "tests" cargo test --workspace --locked
step "fuzz: every mistake of the switch and of vhost-user ports is noticed" cargo test --locked -p bifrost-fuzz --features mutations
# For 2,000 seeds, a build of its own as the million has (scripts/swarm.sh) would take longer than it saves. A test is
# named as well because dependencies then have the features that they have for the tests, and are there already.
step "swarm: build" cargo build --locked --workspace --bin bifrost-sim --test swarm --features bifrost-sim/mutations
step "swarm: 2,000 seeds" "$target/debug/bifrost-sim" swarm --seeds 0..2000 --keep "$out/swarm"
step "swarm: every deliberate mistake is noticed" "$target/debug/bifrost-sim" mutations --seeds 0..2000
# With the benchmark: it brings dependencies of its own, and with them other features of what all share, which else were built twice.
step "release build" cargo build --release --workspace --locked --bins --bench instructions
step "studies in the simulator, in short: their bars" "$target/release/bifrost-sim" study all --quick --out "$out/studies"
step "cost of the transport" scripts/cost.sh
for run in 1 2; do
    step "end to end: redis-loss, run $run" end_to_end 8 redis-loss "$run"
    step "end to end: path-failure, run $run" end_to_end 3 path-failure "$run" --modes bifrost
done
step "end to end: iperf" end_to_end 3 iperf 1
echo "== all $total steps passed in $(($(date +%s) - began)) s"
