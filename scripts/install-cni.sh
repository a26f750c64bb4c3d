#!/bin/sh
# Builds the tools that test the CNI plugin, unless they exist: cnitool, a runtime, and the plugin that assigns
# addresses.
# Prints their directory; tests expect it in BIFROST_CNI_TOOLS.
set -eu
"$(dirname "$0")/build-go-tools.sh" cni cnitool=github.com/containernetworking/cni/cnitool \
    host-local=github.com/containernetworking/plugins/plugins/ipam/host-local
