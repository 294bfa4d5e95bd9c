#!/usr/bin/env bash
# Runs structure_test.py with the parser that ./bazelw has installed.
export PYTHONPATH=$PWD/../tree_sitter/packages:$PWD/tools
exec python3 -B tests/tools/structure_test.py -v
