#!/usr/bin/env bash
# Runs prose_test.py.
export PYTHONPATH=$PWD/tools
exec python3 -B tests/tools/prose_test.py -v
