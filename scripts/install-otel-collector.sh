#!/bin/sh
# Builds an OpenTelemetry collector as in tools/otel, unless it exists. Prints its path; tests of traces expect it in
# BIFROST_OTELCOL. The first run takes a few minutes.
set -eu
directory=$("$(dirname "$0")/build-go-tools.sh" otel otelcol=.)
echo "$directory/otelcol"
