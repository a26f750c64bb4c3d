#!/bin/sh
# Builds Podman's generator of systemd units, unless it exists: Debian 12 has a Podman without one. Prints its path; a
# test of bifrostctl expects it in BIFROST_QUADLET.
set -eu
directory=$("$(dirname "$0")/build-go-tools.sh" quadlet quadlet=github.com/containers/podman/v5/cmd/quadlet)
echo "$directory/quadlet"
