#!/usr/bin/env bash
# Runs mutation_test.py with the parser that ./bazelw has installed.
export PYTHONPATH=$PWD/../tree_sitter/packages:$PWD/tools/mutation
exec python3 -B tests/tools/mutation_test.py -v
