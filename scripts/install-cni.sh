#!/bin/sh
# Builds what the CNI plugin is tested with, unless it is there: cnitool, a runtime, the plugin that gives out addresses, and the
# plugin to compare with. Prints their directory; tests want it in BIFROST_CNI_TOOLS.
set -eu
plugins=github.com/containernetworking/plugins/plugins
"$(dirname "$0")/build-go-tools.sh" cni cnitool=github.com/containernetworking/cni/cnitool \
    host-local=$plugins/ipam/host-local bridge=$plugins/main/bridge
