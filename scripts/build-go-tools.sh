#!/bin/sh
# Builds programs in Go that tests need, as in tools/NAME/go.mod, into a directory of the user's cache, unless they
# exist. Prints the directory. The first run takes half a minute or more.
#   scripts/build-go-tools.sh NAME PROGRAM=PACKAGE...
set -eu
name=$1
shift
cd "$(dirname "$0")/../tools/$name"

cache=${XDG_CACHE_HOME:-${HOME:?}/.cache}/bifrost
sources=$(ls go.mod go.sum ./*.go 2>/dev/null || true)
# shellcheck disable=SC2086 # a list of words
directory=$cache/$name-$(cat $sources | sha256sum | cut -c 1-12)
is_there=yes
for program in "$@"; do
    [ -x "$directory/${program%%=*}" ] || is_there=
done
if [ -n "$is_there" ]; then
    echo "$directory"
    exit 0
fi

needed=$(sed -n 's/^go //p' go.mod)
PATH=$PATH:/usr/local/go/bin
if ! command -v go >/dev/null 2>&1; then
    echo "build-go-tools.sh: go is missing; install Go $needed or later (https://go.dev/dl)" >&2
    exit 1
fi
# Go 1.21 and later download the required version, unless that is disabled.
version=$(go env GOVERSION 2>/dev/null || true)
if [ -z "$version" ]; then
    echo "build-go-tools.sh: $(go version 2>&1 | head -n 1) is too old; install Go $needed or later (https://go.dev/dl)" >&2
    exit 1
fi

new=$directory.new.$$
trap 'rm -rf "$new"' EXIT
mkdir -p "$new"
for program in "$@"; do
    echo "build-go-tools.sh: building ${program%%=*} with $version into $directory" >&2
    CGO_ENABLED=0 go build -mod=readonly -o "$new/${program%%=*}" "${program#*=}" >&2
done
rm -rf "$directory"
mv "$new" "$directory"
echo "$directory"
