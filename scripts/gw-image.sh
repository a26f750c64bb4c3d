#!/bin/sh
# Builds the OCI image of a gateway pod: only `bifrost-gw` and the libraries that it needs.
# usage: gw-image.sh [BINARY] [NAME]; by default target/release/bifrost-gw and localhost/bifrost-gw.
# PODMAN is the program that builds it; default: podman.
set -eu

binary=${1:-${CARGO_TARGET_DIR:-target}/release/bifrost-gw}
name=${2:-localhost/bifrost-gw}
podman=${PODMAN:-podman}

if ! [ -x "$binary" ]; then
    echo "gw-image.sh: $binary is missing: build it with \`cargo build --release -p bifrost-gatewayd\`" >&2
    exit 1
fi
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
trap 'exit 1' INT TERM
mkdir -p "$context/root"
cp "$binary" "$context/root/bifrost-gw"
# Absolute paths of libraries and of the loader, which keep their paths.
ldd "$binary" | sed -n 's,^[^/]*\(/[^ ]*\) (0x.*,\1,p' | while read -r library; do
    mkdir -p "$context/root${library%/*}"
    cp -L "$library" "$context/root$library"
done
cat >"$context/Containerfile" <<END
FROM scratch
COPY root /
ENTRYPOINT ["/bifrost-gw"]
LABEL org.opencontainers.image.title="bifrost-gw"
LABEL org.opencontainers.image.description="A gateway pod of Bifrost"
LABEL org.opencontainers.image.licenses="Apache-2.0"
END
"$podman" build --quiet --isolation=chroot --network=host --tag "$name" "$context"
