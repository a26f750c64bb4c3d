#!/bin/sh
# All checks, in order, with a line of progress for every step. `make test` and `.ci/run` run it.
set -eu
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
out=${OUT:-out}/test
sudo=""
[ "$(id -u)" -eq 0 ] || sudo=sudo
began=$(date +%s)
number=0
total=31

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

# Runs an experiment and checks its bars, as `make bench` does; bars of speed are relaxed by the slack below, because
# runs are short and the machine may have other work. They still pass reliably because ratios are taken within a
# repetition, medians of several repetitions count, and a point is measured again if, and only if, the machine itself
# stood still during it.
slack=1.5
end_to_end() {
    experiment "$@" && "$target/release/bifrost-lab" check "$1" --slack "$slack" --out "$out/$1-$2"
}

# Runs an experiment, and checks that it leaves no network namespace behind.
experiment() {
    name=$1
    results="$out/$1-$2"
    shift 2
    $sudo "$target/release/bifrost-lab" run "$name" --quick --out "$results" "$@" &&
        [ -z "$(ip netns list | grep '^bl[0-9]*x' || true)" ]
}

# Programs that only tests use are installed and built while the workspace is checked, which needs only a compiler.
mkdir -p "$out"
prepare() {
    $sudo scripts/install-debian-packages.sh || return
    # Without these programs, the tests that need them are skipped below, with a message.
    nice -n 19 scripts/install-etcd.sh || true
    nice -n 19 scripts/install-cni.sh || true
    nice -n 19 scripts/install-quadlet.sh || true
    nice -n 19 scripts/install-otel-collector.sh || true
}
packages() {
    [ -z "${installed:-}" ] || return 0
    installed=yes
    wait "$preparing" || {
        cat "$out/prepare.log" >&2
        return 1
    }
}
# Prompts for a password, if needed, while the user is watching.
$sudo true
prepare >"$out/prepare.log" 2>&1 &
preparing=$!
trap 'kill "$preparing" 2>/dev/null || true' EXIT
command -v cc >/dev/null || packages
step "formatting" cargo fmt --all --check
step "plain words" scripts/check-prose.sh
lints() {
    cargo clippy --workspace --all-targets --locked -- -D warnings &&
        # `cargo test` leaves these out, and therefore so does --all-targets.
        cargo clippy --workspace --test attacks --locked -- -D warnings
}
step "lints" lints
step "documentation" env RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked
step "Debian packages, begun above" packages
build_tests() {
    cargo test --workspace --locked --no-run && cargo test --workspace --test attacks --locked --no-run
}
step "tests: build" build_tests
# Builds only the programs that the experiments below run, because linking one with cross-crate optimisation takes up
# to half a minute. It includes the benchmark, whose dependencies enable other features of shared crates, which would
# otherwise be built twice. It uses only what the tests leave of the processors (SCHED_IDLE), and so does counting
# instructions, whose result does not depend on what runs beside it.
# shellcheck disable=SC2016 # the inner shell expands it
chrt --idle 0 sh -c 'cargo build --release --workspace --locked --bin bifrostd --bin bifrostctl --bin bifrost-lab \
    --bin bifrost-cni --bin bifrost-fleet --bin bifrost-relay --bin bifrost-agent --bin bifrost-sim \
    --bin bifrost-cost --bench instructions && scripts/cost.sh' \
    >"$out/release-build.log" 2>&1 &
release=$!
trap 'kill "$release" 2>/dev/null || true' EXIT
step "tests" cargo test --workspace --locked
alerts() {
    promtool=/var/cache/bifrost-lab/prometheus/usr/bin/promtool
    "$promtool" check rules packaging/prometheus/bifrost.rules.yml &&
        "$promtool" test rules packaging/prometheus/bifrost.test.yml
}
step "alert rules" alerts
dashboards() {
    BIFROST_PROMETHEUS=${promtool%/*}/prometheus \
        cargo test --locked --workspace --test fleet -- dashboards --ignored
}
step "dashboards: every panel shows what Prometheus has read" dashboards
# A test that needs a collector.
in_collector() {
    if ! collector=$(scripts/install-otel-collector.sh); then
        echo "SKIPPED: the trace of a change in a collector, because it cannot be built here (see above)"
        return 0
    fi
    BIFROST_OTELCOL=$collector cargo test --locked --workspace --test fleet -- collector --ignored
}
step "traces: an OpenTelemetry collector gets that of a change" in_collector
# Tests that need etcd, which `cargo test` leaves out.
in_etcd() {
    if ! etcd=$(scripts/install-etcd.sh); then
        echo "SKIPPED: tests in etcd, because etcd cannot be built here (see above)"
        return 0
    fi
    BIFROST_ETCD=$etcd cargo test --locked --workspace "$@"
}
step "the store in etcd: members and networks that fail" in_etcd --test etcd -- --ignored --test-threads 2
step "relays in etcd: relays, hosts and members that fail" in_etcd --test fleet -- matrix --ignored
step "guests while etcd is down" in_etcd --test outage -- --ignored
# Tests that need cnitool, Podman and containerd.
in_runtimes() {
    if ! tools=$(scripts/install-cni.sh); then
        echo "SKIPPED: the tests of the CNI plugin under runtimes, because cnitool cannot be built here (see above)"
        return 0
    fi
    BIFROST_CNI_TOOLS=$tools cargo test --locked --workspace --test e2e -- cni --ignored
}
step "containers of runtimes: cnitool, Podman, containerd" in_runtimes
# Podman's generator reads the unit for Quadlet.
in_quadlet() {
    if ! quadlet=$(scripts/install-quadlet.sh); then
        echo "SKIPPED: the test of the unit for Quadlet, because its generator cannot be built here (see above)"
        return 0
    fi
    BIFROST_QUADLET=$quadlet cargo test --locked --workspace --lib -- quadlet --ignored
}
step "a gateway pod as a unit of Quadlet" in_quadlet
# Both of the following use the same features, for the whole workspace, so dependencies are those of the tests, and
# the build with deliberate mistakes is done once.
mistakes="--locked --workspace --features bifrost-fuzz/mutations,bifrost-sim/mutations"
# shellcheck disable=SC2086 # a list of words
step "fuzz: every mistake of the switch and of vhost-user ports is noticed" \
    cargo test $mistakes --test messages --test replay --test rings -- every_mutation inputs
# For 2,000 seeds, a separate build as for the million (scripts/swarm.sh) would take longer than it saves. A test is
# named as well, so that dependencies have the same features as for tests.
# shellcheck disable=SC2086 # a list of words
step "swarm: build" cargo build $mistakes --bin bifrost-sim --test swarm
step "swarm: 2,000 seeds" "$target/debug/bifrost-sim" swarm --seeds 0..2000 --keep "$out/swarm"
step "swarm: every deliberate mistake is noticed" "$target/debug/bifrost-sim" mutations --seeds 0..2000
step "swarm: 500 worlds of messages over RDMA" "$target/debug/bifrost-sim" swarm --rdm --seeds 0..500 --keep "$out/swarm"
step "swarm: every deliberate mistake with messages is noticed" "$target/debug/bifrost-sim" mutations --rdm --seeds 0..500
release_build() {
    status=0
    wait "$release" || status=$?
    cat "$out/release-build.log"
    return "$status"
}
step "release build and cost of the transport, begun above" release_build
step "studies in the simulator, in short: their bars" "$target/release/bifrost-sim" study all --quick --out "$out/studies"
# They compare latencies, so nothing else may run beside them.
step "attacks: other tenants notice nothing" cargo test --workspace --locked --test attacks
step "end to end: redis-loss" end_to_end redis-loss 1 --injectors wire --losses 0,1 --repetitions 5
step "end to end: path-failure" end_to_end path-failure 1 --modes bifrost --repetitions 3
step "end to end: a second time, beside what the first has left" experiment redis-loss 2 --injectors wire --losses 1 --modes bifrost
step "end to end: iperf" end_to_end iperf 1 --modes bifrost --repetitions 5
step "end to end: cni" end_to_end cni 1
step "end to end: learn" end_to_end learn 1 --routes 20000 --used 400 --repetitions 7
step "end to end: a minute of faults" end_to_end soak 1
echo "== all $total steps passed in $(($(date +%s) - began)) s"
