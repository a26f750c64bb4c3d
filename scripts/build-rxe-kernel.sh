#!/bin/sh
# Builds a kernel for tests against another implementation of RoCEv2: user-mode Linux with the kernel's soft-RoCE (rxe), from
# Debian's source package and scripts/rxe-kernel.config. Takes about 12 minutes of one core, once: the result is kept.
# Prints its path. If it cannot be built, the script says so and exits with status 77 (skipped).
# It is not part of `make test`; docs/VERIFICATION.md lists the tests that need it.
set -eu

cache=/var/cache/bifrost-lab/rxe-kernel
config=$(cd "$(dirname "$0")" && pwd)/rxe-kernel.config
jobs=${JOBS:-$(nproc)}

skip() {
    echo "build-rxe-kernel.sh: SKIPPED: $1" >&2
    exit 77
}

if [ -x "$cache/linux" ] && cmp -s "$config" "$cache/config"; then
    echo "$cache/linux"
    exit 0
fi
[ "$(uname -m)" = x86_64 ] || skip "user-mode Linux runs on x86-64 only"
command -v apt-get >/dev/null || skip "needs apt-get, for Debian's linux-source package"
for program in cc make xz dpkg-deb bc; do
    command -v "$program" >/dev/null || skip "needs $program (apt-get install gcc libc6-dev make xz-utils bc)"
done
package=$(apt-cache depends linux-source 2>/dev/null | sed -n 's/.*Depends: \(linux-source-[0-9.]*\)$/\1/p' | head -n 1)
[ -n "$package" ] || skip "apt knows no linux-source: run apt-get update"

work=$(mktemp -d "${TMPDIR:-/var/tmp}/bifrost-rxe-kernel.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
cd "$work"
# Unpacked, not installed: nothing else on this machine needs them.
tools="flex bison m4 libfl-dev"
# shellcheck disable=SC2086 # a list of words
apt-get download -qq "$package" $tools || skip "cannot download $package"
for archive in ./*.deb; do
    case "$archive" in
    ./linux-source*) dpkg-deb -x "$archive" source ;;
    *) dpkg-deb -x "$archive" tools ;;
    esac
    rm "$archive"
done
tar -xf source/usr/src/linux-source-*.tar.xz
rm -r source
cd linux-source-*
export PATH="$work/tools/usr/bin:$PATH" BISON_PKGDATADIR="$work/tools/usr/share/bison" M4="$work/tools/usr/bin/m4"
make ARCH=um KCONFIG_ALLCONFIG="$config" allnoconfig >/dev/null
for option in $(sed -n 's/^\(CONFIG_[A-Z0-9_]*\)=.*/\1/p' "$config"); do
    grep -q "^$option=" .config || skip "the source package's kernel cannot have $option"
done
make ARCH=um -j"$jobs" linux >"$work/log" 2>&1 || {
    tail -n 30 "$work/log" >&2
    skip "the kernel does not build"
}
mkdir -p "$cache"
strip -o "$cache/linux.new" linux
mv "$cache/linux.new" "$cache/linux"
cp "$config" "$cache/config"
echo "$cache/linux"
