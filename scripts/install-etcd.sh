#!/bin/sh
# Builds etcd and etcdctl as tools/etcd/go.mod names them, into a directory of the user's cache, unless they are there. Prints
# the path of etcd; tests of the store want it in BIFROST_ETCD. Half a minute the first time.
set -eu
cd "$(dirname "$0")/../tools/etcd"

cache=${XDG_CACHE_HOME:-${HOME:?}/.cache}/bifrost
directory=$cache/etcd-$(cat go.mod go.sum | sha256sum | cut -c 1-12)
if [ -x "$directory/etcd" ] && [ -x "$directory/etcdctl" ]; then
    echo "$directory/etcd"
    exit 0
fi

needed=$(sed -n 's/^go //p' go.mod)
PATH=$PATH:/usr/local/go/bin
if ! command -v go >/dev/null 2>&1; then
    echo "install-etcd.sh: go is not there; install Go $needed or later (https://go.dev/dl), or set BIFROST_ETCD to an etcd 3.6" >&2
    exit 1
fi
# A Go since 1.21 fetches the one that is needed, unless it must not.
version=$(go env GOVERSION 2>/dev/null || true)
if [ -z "$version" ]; then
    echo "install-etcd.sh: $(go version 2>&1 | head -n 1) is too old; install Go $needed or later (https://go.dev/dl)" >&2
    exit 1
fi

echo "install-etcd.sh: building etcd with $version into $directory" >&2
new=$directory.new.$$
trap 'rm -rf "$new"' EXIT
mkdir -p "$new"
CGO_ENABLED=0 go build -mod=readonly -o "$new/etcd" go.etcd.io/etcd/server/v3 >&2
echo "install-etcd.sh: building etcdctl" >&2
CGO_ENABLED=0 go build -mod=readonly -o "$new/etcdctl" go.etcd.io/etcd/etcdctl/v3 >&2
rm -rf "$directory"
mv "$new" "$directory"
echo "$directory/etcd"
