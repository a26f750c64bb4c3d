#!/bin/sh
# Tests the packages libbifrost-rdm0, libbifrost-rdm-dev and libnccl-net-bifrost, as built by `make deb`, without
# installing them: unpacks them; compiles the example from the second one with the flags of pkg-config, against the
# shared and the static library, and lets two processes communicate over the loopback device; lets two ranks use the
# plugin for NCCL.
#   OUT=DIRECTORY  directory of the packages (out)
set -eu
cd "$(dirname "$0")/.."
out=${OUT:-out}

for tool in cc pkg-config dpkg-deb; do
    if ! command -v "$tool" >/dev/null; then
        echo "try-library-debs.sh: $tool is missing: apt-get install gcc libc6-dev pkgconf dpkg" >&2
        exit 1
    fi
done
root=$(mktemp -d)
server=""
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; rm -rf "$root"' EXIT
for package in libnccl-net-bifrost libbifrost-rdm0 libbifrost-rdm-dev; do
    set -- "$out/$package"_*.deb
    if [ $# -ne 1 ] || ! [ -e "$1" ]; then
        echo "try-library-debs.sh: not exactly one $package in $out: run \`make deb\`" >&2
        exit 1
    fi
    dpkg-deb -x "$1" "$root"
done
dpkg-deb -f "$1" Depends | grep -q "libbifrost-rdm0 (= $(dpkg-deb -f "$1" Version))"

libraries=$root/usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH)
# As if the packages were installed on this machine.
export PKG_CONFIG_LIBDIR="$libraries/pkgconfig" PKG_CONFIG_SYSROOT_DIR="$root"
export PKG_CONFIG_ALLOW_SYSTEM_CFLAGS=1 PKG_CONFIG_ALLOW_SYSTEM_LIBS=1
source=$root/usr/share/doc/libbifrost-rdm-dev/examples/pingpong.c
strict="-std=c11 -Wall -Wextra -pedantic -Werror"
# shellcheck disable=SC2046,SC2086 # lists of words
{
    cc $strict "$source" -o "$root/shared" $(pkg-config --cflags --libs bifrost-rdm)
    cc $strict $(pkg-config --cflags bifrost-rdm) "$source" -o "$root/static" "$libraries/libbifrost_rdm.a" \
        $(pkg-config --static --libs-only-l bifrost-rdm | sed 's/-lbifrost_rdm//')
}
# shellcheck disable=SC2046,SC2086 # lists of words
cc $strict "${source%/*}/upgrade.c" -o "$root/upgrade" $(pkg-config --cflags bifrost-rdm) -ldl
if LD_LIBRARY_PATH=$libraries ldd "$root/static" | grep -q bifrost; then
    echo "try-library-debs.sh: the static program needs the shared library" >&2
    exit 1
fi
export LD_LIBRARY_PATH="$libraries"
mkfifo "$root/port"
"$root/shared" serve ::1 >"$root/port" &
server=$!
read -r port <"$root/port"
"$root/static" ask ::1 ::1 "$port" 100 100000
wait "$server"
server=""

# The driver of the tests, with each version of the interface.
# shellcheck disable=SC2086 # a list of words
cc $strict crates/nccl-net/tests/c/driver.c -o "$root/driver" -ldl
export BIFROST_NCCL_ADDRESSES=::1
for version in 8 9 10 11 12; do
    "$root/driver" "$libraries/libnccl-net-bifrost.so" "$version" 0 "$root" 20 &
    server=$!
    "$root/driver" "$libraries/libnccl-net-bifrost.so" "$version" 1 "$root" 20
    wait "$server"
    server=""
done
echo "the library's packages work: $(pkg-config --modversion bifrost-rdm)"
