#!/usr/bin/env bash
# Asks bazel that no dependency leads the wrong way: allocator <- device <- engine <- hooks, LibTorch
# only under hooks and programs, CUDA only under device/cuda and programs.
# Prints one line per rule and "N passed, N failed"; exits 1 if a rule is broken.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

passed=0
failed=0

# What programs of other builds depend on brings CUDA's device and all rooms together.
public="filter('^//(engine:engine|hooks:hooks)$', //engine:all + //hooks:all)"

# rule TEXT FROM TO: no path leads from FROM, but for those, to TO.
rule() {
  local path
  if ! path=$(./bazelw query --noshow_progress "somepath($2 - $public, $3)" 2>&1); then
    echo "FAIL  $1: bazel query failed: $path"
    failed=$((failed + 1))
  elif grep -q '^[@/]' <<<"$path"; then
    echo "FAIL  $1:"
    grep '^[@/]' <<<"$path" | sed 's/^/        /'
    failed=$((failed + 1))
  else
    echo "ok    $1"
    passed=$((passed + 1))
  fi
}

rule "allocator knows no layer above it" "//allocator/..." "(//device/... + //engine/... + //hooks/...)"
rule "the allocator's heap knows no pool, no budget and no source" "//allocator/heap/..." "(//allocator:allocator + //allocator/pool/... + //allocator/ram/... + //allocator/sources/...)"
rule "device knows no layer above it" "//device/..." "(//engine/... + //hooks/...)"
rule "engine does not know hooks" "//engine/..." "//hooks/..."
rule "the library does not know its programs" "(//allocator/... + //device/... + //engine/... + //hooks/...)" "(//bench/... + //examples/... + //programs/... + //shared/... + //tests/...)"
rule "benchmarks do not know examples" "//bench/..." "//examples/..."
rule "examples do not know benchmarks" "//examples/..." "//bench/..."
rule "programs do not know who shares them" "//programs/..." "(//bench/... + //examples/...)"
rule "only hooks includes LibTorch" "(//allocator/... + //device/... + //engine/...)" "@libtorch//..."
rule "engine and hooks include no CUDA" "(//engine/... + //hooks/...)" "@local_config_cuda//..."
rule "allocator and the emulated device include no CUDA" "(//allocator/... + //device/emulated/... + //device/trace/... + //device:all)" "@local_config_cuda//..."
rule "the allocator's archive needs neither LibTorch nor CUDA" "//tools/install:allocator" "(@libtorch//... + @local_config_cuda//...)"
rule "the emulated device does not know CUDA's" "//device/emulated/..." "//device/cuda/..."
rule "CUDA's device does not know the emulated one" "//device/cuda/..." "//device/emulated/..."
rule "engine speaks to device.h alone" "//engine/..." "(//device/emulated/... + //device/cuda/...)"
rule "plans know no device, no allocator and no stream" "//engine/plan/..." "(//device/... + (//allocator/... - //allocator/base:all) + //engine:all + //engine/link/... + //engine/stream/...)"
rule "the engine does not know what its tiers carry" "(//engine:all + //engine/link/... + //engine/stream/... + //engine/plan/...)" "//engine/tier/..."
rule "hooks speak to device.h alone" "(//hooks/... - //hooks/emulated/...)" "(//device/emulated/... + //device/cuda/...)"
rule "LibTorch's emulated device does not know offload" "//hooks/emulated/..." "//hooks/activations:offload_session"
rule "the library comes without the simulator" "//:pinion" "(//device/emulated/... + //hooks/emulated/...)"

echo "$passed passed, $failed failed"
[[ $failed -eq 0 ]]
