#!/usr/bin/env bash
# Runs a test binary that another target has built: cpu_kernels.bzl.
exec "$@"
