#!/bin/sh
# Builds what the CNI plugin is tested with, unless it is there: cnitool, a runtime, and the plugin that gives out addresses.
# Prints their directory; tests want it in BIFROST_CNI_TOOLS.
set -eu
"$(dirname "$0")/build-go-tools.sh" cni cnitool=github.com/containernetworking/cni/cnitool \
    host-local=github.com/containernetworking/plugins/plugins/ipam/host-local
