#!/bin/sh
# Builds etcd and etcdctl as in tools/etcd/go.mod, unless they exist. Prints the path of etcd; tests of the store
# expect it in BIFROST_ETCD.
set -eu
directory=$("$(dirname "$0")/build-go-tools.sh" etcd \
    etcd=go.etcd.io/etcd/server/v3 etcdctl=go.etcd.io/etcd/etcdctl/v3)
echo "$directory/etcd"
