#!/bin/sh
# Runs under Miri what Miri can run: everything without system calls, in few and small cases. Installs the nightly
# toolchain with Miri if it is not there. Takes about half an hour.
set -eu
cd "$(dirname "$0")/.."

rustup toolchain install nightly --profile minimal --component miri --component rust-src --no-self-update >/dev/null
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/miri"
# Property tests read their seeds from files, and draw few cases.
export MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-strict-provenance" PROPTEST_CASES=3 PROPTEST_MAX_SHRINK_ITERS=0

run() {
    echo "== miri: $*"
    cargo +nightly miri test --quiet --locked "$@"
}

# What has `unsafe`: buffers, rings, the reading of control messages. The rest of the crate is system calls.
run -p bifrost-port --lib -- pool:: steer:: clock::receive
run -p bifrost-udp
# What has none, and so can only be let down by what it builds upon.
run -p bifrost-wire
run -p bifrost-plb cases
run -p bifrost-tables
run -p bifrost-nic
run -p bifrost-avs
run -p bifrost-transport
run -p bifrost-rte --lib -- recv_window send_window flow_table path:: handshake set_up_costs
# The table that a gateway's cores share, with threads that race.
run -p bifrost-gateway --lib -- shared::
run -p bifrost-fuzz --test replay
