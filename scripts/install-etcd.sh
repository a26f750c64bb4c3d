#!/bin/sh
# Builds etcd and etcdctl as tools/etcd/go.mod names them, unless they are there. Prints the path of etcd; tests of the store
# want it in BIFROST_ETCD.
set -eu
directory=$("$(dirname "$0")/build-go-tools.sh" etcd \
    etcd=go.etcd.io/etcd/server/v3 etcdctl=go.etcd.io/etcd/etcdctl/v3)
echo "$directory/etcd"
