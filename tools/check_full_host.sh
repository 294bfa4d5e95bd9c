#!/usr/bin/env bash
# Runs README's first command, in short, and its program where 95 % of the host's RAM is in use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

programs=(//examples:train_gpt //examples:offload //tests/support:full_host.so)
./bazelw build --config=opt --noshow_progress "${programs[@]}"
on_full_host() { LD_PRELOAD=$PWD/bazel-bin/tests/support/full_host.so "$@"; }

# It obeys the marks: that it keeps its tensors shows that the host looks full.
on_full_host bazel-bin/examples/offload | grep -E 'packed = 0 offloaded .*no host memory [1-9]'
# On emu it does not.
on_full_host bazel-bin/examples/train_gpt --device=emu:0 --size=tiny --steps=2 | grep loss
