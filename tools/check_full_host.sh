#!/usr/bin/env bash
# Runs README's first command, shortened, and its program with 95 % of the host's RAM in use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

programs=(//examples:train_gpt //examples:offload //tests/support:full_host.so)
./bazelw build --config=opt --noshow_progress "${programs[@]}"
on_full_host() { LD_PRELOAD=$PWD/bazel-bin/tests/support/full_host.so "$@"; }

# The program obeys the watermarks: it keeps its tensors resident, so the host looks full.
on_full_host bazel-bin/examples/offload | grep -E 'packed = 0 offloaded .*no host memory [1-9]'
# On emu train_gpt ignores the watermarks.
on_full_host bazel-bin/examples/train_gpt --device=emu:0 --size=tiny --steps=2 | grep loss
