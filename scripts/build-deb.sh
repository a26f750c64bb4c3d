#!/bin/sh
# Builds the Debian packages: `bifrost` (programs, systemd unit, configuration, guide, manual pages, completions, dissector),
# `bifrost-agent` and `bifrost-relay` (many hosts from one place), `bifrost-gateway`, `libbifrost-rdm0` and `libbifrost-rdm-dev`
# (messages over RDMA for C), `libnccl-net-bifrost` (a plugin for NCCL). The last line that it prints is the path of `bifrost`; the
# others are beside it. Needs the Rust toolchain and debhelper.
#   OUT=DIRECTORY      where the package goes (out)
#   DEB_VERSION=TEXT   the package's version (that of Cargo.toml)
#   BIN_DIR=DIRECTORY  take programs and libraries from this directory instead of building them
set -eu
cd "$(dirname "$0")/.."

for tool in dh:debhelper dpkg-buildpackage:dpkg-dev; do
    if ! command -v "${tool%%:*}" >/dev/null; then
        echo "build-deb.sh: ${tool%%:*} is missing: apt-get install ${tool##*:}" >&2
        exit 1
    fi
done

out=${OUT:-out}
target=${CARGO_TARGET_DIR:-target}
version=${DEB_VERSION:-$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)}
# Reproducible: the same sources give the same package.
date=$(git log -1 --format=%cd --date=rfc2822 2>/dev/null || date -R)

if [ -z "${BIN_DIR:-}" ]; then
    cargo build --release --locked -p bifrostd -p bifrostctl -p bifrost-cni -p bifrost-agent -p bifrost-relay -p bifrost-gatewayd \
        -p bifrost-capi -p bifrost-nccl-net
    BIN_DIR=$target/release
fi
cargo build --locked --workspace --example manual

build=$out/deb/build
rm -rf "$out/deb"
mkdir -p "$build"
cp -R packaging/debian "$build/debian"
cp packaging/bifrostd.service "$build/debian/bifrost.bifrostd.service"
cp packaging/bifrostd.toml packaging/wireshark/bifrost.lua docs/OPERATIONS.md docs/COUNTERS.md docs/PROTOCOL.md "$build"
cp -R docs/operations packaging/prometheus packaging/grafana "$build"
for program in bifrostd bifrostctl bifrost-cni bifrost-agent bifrost-relay bifrost-nicd bifrost-gw \
    bifrost-gw-console; do
    cp "$BIN_DIR/$program" "$build"
done
cp packaging/bifrost-agent.service packaging/bifrost-relay.service "$build/debian"
cp packaging/gateway/bifrost-nicd.service "$build/debian/bifrost-gateway.bifrost-nicd.service"
cp packaging/gateway/bifrost-gw-console.service "$build/debian/bifrost-gateway.bifrost-gw-console.service"
cp packaging/agent.env packaging/relay.env "$build"
cp packaging/gateway/nicd.toml packaging/gateway/vpc.toml packaging/gateway/kubernetes.yaml \
    packaging/gateway/bifrost-gw@.container packaging/gateway/bifrost-gw@.service scripts/gw-image.sh "$build"
cp docs/FLEET.md docs/GATEWAY.md docs/GATEWAY-TRAILER.md docs/ROUTES-FILE.md "$build"
"$target/debug/examples/manual" "$build"

multiarch=$(dpkg-architecture -qDEB_HOST_MULTIARCH)
cp "$BIN_DIR/libbifrost_capi.so" "$build/libbifrost_rdm.so.0"
cp "$BIN_DIR/libbifrost_capi.a" "$build/libbifrost_rdm.a"
cp "$BIN_DIR/libnccl_net_bifrost.so" "$build/libnccl-net-bifrost.so"
cp crates/capi/include/bifrost_rdm.h crates/capi/examples/*.c docs/RDM-LIBRARY.md docs/RDM.md "$build"
sed -e "s|@PREFIX@|/usr|; s|@LIBDIR@|/usr/lib/$multiarch|; s|@VERSION@|$version|" crates/capi/bifrost-rdm.pc.in \
    >"$build/bifrost-rdm.pc"
cat >"$build/debian/changelog" <<END
bifrost ($version) unstable; urgency=medium

  * Built from source; CHANGELOG.md there says what is new.

 -- Bifrost maintainers <root@localhost>  $date
END
(cd "$build" && dpkg-buildpackage --build=binary --no-sign >../build.log 2>&1) || {
    cat "$out/deb/build.log" >&2
    exit 1
}
package=$(ls "$out"/deb/bifrost_*.deb)
mv "$out"/deb/*.deb "$out"
rm -rf "$build"
echo "$out/${package##*/}"
