#!/bin/sh
# Runs under Miri everything without system calls, with few and small cases. Installs the nightly toolchain with Miri
# if it is missing. Takes about half an hour.
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

# Code with `unsafe`: buffers, rings, parsing of control messages. The rest of the crate is system calls.
run -p bifrost-port --lib -- pool:: steer:: clock::receive
run -p bifrost-udp
# Code without `unsafe`, which can only be affected by its dependencies.
run -p bifrost-wire
run -p bifrost-plb cases
run -p bifrost-tables
run -p bifrost-nic
run -p bifrost-avs
run -p bifrost-transport
run -p bifrost-rte --lib -- recv_window send_window flow_table path:: handshake set_up_costs
# The table that a gateway's cores share, with racing threads.
run -p bifrost-gateway --lib -- shared::
run -p bifrost-fuzz --test replay
