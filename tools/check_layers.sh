#!/usr/bin/env bash
# Asks bazel that no dependency leads the wrong way: allocator <- device <- engine <- hooks, LibTorch
# only under hooks and programs, CUDA only under device/cuda and programs, no clock under plans, and
# no circle of rooms.
# Prints one line per rule and "N passed, N failed"; exits 1 if a rule is broken.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

passed=0
failed=0

# What programs of other builds depend on brings CUDA's device and all rooms together.
public="filter('^//(engine:engine|hooks:hooks)$', //engine:all + //hooks:all)"

ok() { # ok TEXT: the rule holds
  echo "ok    $1"
  passed=$((passed + 1))
}

fail() { # fail TEXT LINES: it is broken, which the lines show
  echo "FAIL  $1:"
  sed 's/^/        /' <<<"$2"
  failed=$((failed + 1))
}

nothing() { # nothing TEXT QUERY: the query finds no target
  local found
  if ! found=$(./bazelw query --noshow_progress "$2" 2>&1); then
    fail "$1: bazel query failed" "$found"
  elif grep -q '^[@/]' <<<"$found"; then
    fail "$1" "$(grep '^[@/]' <<<"$found")"
  else
    ok "$1"
  fi
}

# rule TEXT FROM TO: no path leads from FROM, but for those that are public, to TO.
rule() { nothing "$1" "somepath($2 - $public, $3)"; }

no_line() { # no_line TEXT PATTERN FOLDER...: no line of a file there matches the pattern
  local text=$1 pattern=$2 found
  shift 2
  found=$(grep -rnE "$pattern" "$@")
  # 1: it has looked and found nothing.
  if [[ $? -eq 1 ]]; then ok "$text"; else fail "$text" "$found"; fi
}

# no_include TEXT PATTERN FOLDER...: no file there includes what the pattern matches
no_include() { no_line "$1" "^#include [<\"]($2)[>\"]" "${@:3}"; }

no_circle() { # no_circle TEXT LAYER...: rooms of the layers do not depend on each other in a circle
  local text=$1 found
  shift
  if found=$(./bazelw query --noshow_progress --output=graph --nograph:factored "$(printf '//%s/... + ' "$@")set()" |
    python3 tools/room_circles.py 2>&1); then ok "$text"; else fail "$text" "$found"; fi
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
# What computes plans and what runs them, with the model of the link.
plans="(//engine/planner/... + //engine/schedule/... + //engine/link:link_model)"
plan_files=(engine/planner engine/schedule engine/link/{link_calibration,packing}.{h,cc})
rule "plans know no device, no allocator and no stream" "$plans" "(//device/... + (//allocator/... - //allocator/base:all) + //engine:all + (//engine/link/... - //engine/link:link_model) + //engine/stream/...)"
rule "what computes plans does not know what runs them" "(//engine/planner/... + //engine/link:link_model)" "//engine/schedule/..."
rule "plans know no clock" "$plans" "(//allocator/base:deadline + @com_google_absl//absl/time:all)"
# Durations are no clock. That one wait of several shares a timeout out among them.
tickets="(//engine/tier:parcel + //engine/tier:parcel_text)"
nothing "the tier has no clock but in Parcel::ViewOnHost" "(//engine/tier/... intersect rdeps(//engine/tier/..., //allocator/base:deadline, 1)) - $tickets"
no_include "plans and the tier include no other clock" "chrono|ctime|time\.h|sys/time\.h|absl/time/clock\.h" "${plan_files[@]}" engine/tier
# ThreadSanitizer is not asked about plans (.ci/run).
no_line "plans and their tests have no threads, locks and atomics" '^#include.*(thread|mutex|future|atomic|synchronization)|std::(j?thread|async|atomic)|pthread_|RunThreads|Mutex' "${plan_files[@]}" tests/engine/planner tests/engine/schedule
rule "tests of plans use nothing that has threads" "(//tests/engine/planner/... + //tests/engine/schedule/...)" "(//device/... + (//allocator/... - //allocator/base:all) + (//engine/... - $plans) + //tests/support:run_threads)"
rule "the engine does not know what its tiers carry" "(//engine:all + //engine/link/... + //engine/stream/... + $plans)" "//engine/tier/..."
rule "hooks speak to device.h alone" "(//hooks/... - //hooks/emulated/...)" "(//device/emulated/... + //device/cuda/...)"
rule "LibTorch's emulated device does not know offload" "//hooks/emulated/..." "//hooks/activations:offload_session"
rule "the library comes without the simulator" "//:pinion" "(//device/emulated/... + //hooks/emulated/...)"
no_circle "no circle of rooms" allocator device engine hooks

echo "$passed passed, $failed failed"
[[ $failed -eq 0 ]]
