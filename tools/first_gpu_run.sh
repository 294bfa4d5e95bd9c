#!/usr/bin/env bash
# The first half hour on a GPU: everything that only a GPU can show, in the order in which it is
# worth knowing, each command with a time limit of its own.
#
#   tools/first_gpu_run.sh                       in a checkout: builds the programs first
#   ./first_gpu_run.sh                           in a copy of //tools/portable's folder, beside any torch 2.11
#   tools/first_gpu_run.sh --device=emu:0        the same on the emulated device, with small sizes
#
#   --out=DIRECTORY        where the results go; default: first_gpu_run_<date>
#   --programs=DIRECTORY   where the programs are; default: bin beside this file, else they are built
#   --steps=2,4,6          only these; default: all
#   --limit=SECONDS        a time limit for each command, instead of its own
#
# Leaves a log of each command, what the programs wrote, summary.txt and summary.json. Goes on after
# a failure; fails if anything failed. docs/first_gpu_run.md says how to read the results.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
device=cuda:0 out="" programs="" wanted="" limit=""
for argument in "$@"; do
  case $argument in
  --device=*) device=${argument#*=} ;;
  --out=*) out=${argument#*=} ;;
  --programs=*) programs=${argument#*=} ;;
  --steps=*) wanted=,${argument#*=}, ;;
  --limit=*) limit=${argument#*=} ;;
  *)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    [[ $argument == --help ]] && exit
    echo "first_gpu_run: unknown argument $argument" >&2
    exit 2
    ;;
  esac
done
case $device in
cuda:*) on_gpu=true ;;
emu:0) on_gpu=false ;;
*)
  echo "first_gpu_run: --device=$device is neither cuda:N nor emu:0" >&2
  exit 2
  ;;
esac

if [[ -z $programs ]]; then
  if [[ -d $here/bin ]]; then
    programs=$here/bin
  else
    (cd "$here/.." && ./bazelw build --config=portable //tools/portable) || exit
    programs=$here/../bazel-bin/tools/portable/portable/bin
    # They run beside the LibTorch that they were built against.
    for torch in "$here"/../.venv/lib/python3*/site-packages/torch; do
      [[ -n ${TORCH_PATH:-} || ! -d $torch ]] || export TORCH_PATH=$torch
    done
  fi
fi
programs=$(cd "$programs" && pwd) || exit
out=${out:-first_gpu_run_$(date +%Y-%m-%d_%H%M%S)}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit
export PINION_TEST_DEVICE=${device/%emu:0/emu}
# cuBLAS repeats its results only with a workspace of a fixed size.
export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8}

# --- Running a command within its time ---

steps=() names=() verdicts=() seconds=() notes=()
step=0
step_name=""
verdict=""
device_answers=true

# Whether the children of process group $1 are gone within $2 seconds.
gone_within() {
  local i
  for ((i = 0; i < 10 * $2; i++)); do
    kill -0 -- "-$1" 2>/dev/null || return 0
    sleep 0.1
  done
  return 1
}

record() { # record NAME VERDICT SECONDS NOTE
  verdict=$2
  steps+=("$step") names+=("$1") verdicts+=("$2") seconds+=("$3") notes+=("$4")
  printf '%2d  %-44s %-10s %5d s  %s\n' "$step" "$step_name: $1" "$2" "$3" "$4" | tee -a "$out/summary.txt"
}

log_of() { # log_of NAME: where a case of this step leaves its log
  printf '%s/%02d_%s.log' "$out" "$step" "${1//[^a-zA-Z0-9_.-]/_}"
}

last_words() { # the line of a log that says most: an error, else the last
  { grep -aE 'FAILED|[Ee]rror|abort|MISSED|terminate|out of memory' "$1" || grep -a . "$1"; } 2>/dev/null |
    tail -n 1 | tr -d '\000-\037"\\' | cut -c 1-160
}

# run NAME SECONDS COMMAND...: one case of a step. Sets `verdict`: passed, failed, timed-out, skipped.
# A process that hangs in the driver cannot be killed: after a while it is left behind.
run() {
  local name=$1 allowed=${limit:-$2} log started took group status note
  shift 2
  if [[ $device_answers == false ]]; then
    record "$name" not-run 0 "the device no longer answers"
    return
  fi
  log=$(log_of "$name")
  printf '%q ' "$@" >"${log%.log}.command"
  started=$SECONDS
  (cd "$out" && exec setsid "$@") >"$log" 2>&1 </dev/null &
  group=$!
  while ((SECONDS - started < allowed)) && kill -0 "$group" 2>/dev/null; do sleep 0.1; done
  if kill -0 "$group" 2>/dev/null; then
    kill -TERM -- "-$group" 2>/dev/null
    gone_within "$group" 5 || kill -KILL -- "-$group" 2>/dev/null
    note="after $allowed s; it was saying: $(last_words "$log")"
    gone_within "$group" 5 || note="cannot be killed, so it hangs in the driver; $note"
    record "$name" timed-out $((SECONDS - started)) "$note"
    ask_the_device
    return
  fi
  wait "$group"
  status=$?
  took=$((SECONDS - started))
  if ((status > 128)); then
    record "$name" failed "$took" "died of signal $((status - 128)): $(last_words "$log")"
    ask_the_device
  elif ((status != 0)); then
    record "$name" failed "$took" "exit code $status: $(last_words "$log")"
  elif grep -aq '^\[  PASSED  \] 0 tests' "$log"; then
    record "$name" skipped "$took" "$(grep -aA 1 'Skipped' "$log" | tail -n 1 | tr -d '\000-\037"\\' | cut -c 1-160)"
  else
    record "$name" passed "$took" ""
  fi
}

ask_the_device() {
  $on_gpu || return 0
  command -v nvidia-smi >/dev/null || return 0
  timeout --kill-after=1 20 nvidia-smi >"$out/nvidia-smi_after_$(printf %02d "$step").txt" 2>&1 || device_answers=false
}

begin() { # begin NUMBER NAME: whether the step is wanted
  step=$1 step_name=$2
  [[ -z $wanted || $wanted == *,"$1",* ]]
}

train() { # train NAME SECONDS FLAGS...: train_gpt, its JSON beside the log
  local name=$1 allowed=$2
  shift 2
  run "$name" "$allowed" "$programs/train_gpt" --device="$device" --json="$(log_of "$name" | sed 's/log$/json/')" "$@"
}

# Changes a verdict after the fact: what the program wrote says more than its exit code.
amend() { # amend VERDICT NOTE
  verdict=$1
  verdicts[-1]=$1 notes[-1]=$2
  printf '    %s: %s\n' "$1" "$2" | tee -a "$out/summary.txt"
}

# --- The steps ---

if $on_gpu; then
  gpu_tests=cuda_gpu_test
  many=() small=(--size=small) large=(--layers=2 --width=4096 --heads=32 --sequence=2048 --batch=32)
  soak_seconds=120
else
  gpu_tests=fake_cuda_conformance_test
  many=(--size=tiny) small=(--size=tiny --device_memory=unlimited) large=("${small[@]}" --width=256 --sequence=128)
  soak_seconds=2
fi

echo "first_gpu_run on $device, results in $out" | tee "$out/summary.txt"
{
  date
  uname -a
  free -g
  echo "locked memory: $(ulimit -l) KiB"
  cat /sys/kernel/mm/transparent_hugepage/enabled /proc/self/cgroup
  lscpu
  if $on_gpu; then
    timeout --kill-after=1 20 nvidia-smi -q
    timeout --kill-after=1 20 nvidia-smi topo -m
  fi
} >"$out/machine.txt" 2>&1

if begin 1 "loader"; then
  for program in "$programs"/*; do
    name=${program##*/}
    # Some programs exit with 1 after --help; a library that is missing gives 127.
    run "$name" 60 sh -c 'LD_DEBUG=libs "$0" --help; [ $? -le 1 ]' "$program"
    log=$(log_of "$name")
    runtimes=$(grep -ao 'calling init: .*libcudart[^ ]*' "$log" | sed 's/calling init: //' | sort -u)
    if [[ $verdict == failed ]]; then
      amend failed "$(grep -a 'error while loading' "$log" | head -n 1 | tr -d '"\\')"
    elif (($(wc -w <<<"$runtimes") > 1)); then
      amend failed "two CUDA runtimes in one process: ${runtimes//$'\n'/ }"
    fi
  done
fi

if begin 2 "device tests"; then
  run "$gpu_tests" 300 "$programs/$gpu_tests"
  if $on_gpu && [[ $verdict == failed || $verdict == timed-out ]]; then
    # The batch call is the newest of the runtime's calls that Pinion makes, with reports of hangs
    # and crashes to its name.
    run "$gpu_tests without the batch call" 300 env PINION_COPY_LOOP=1 "$programs/$gpu_tests"
    if [[ $verdict == passed ]]; then
      export PINION_COPY_LOOP=1
      echo "    the batch call is the culprit: the steps below run with PINION_COPY_LOOP=1" | tee -a "$out/summary.txt"
    fi
  fi
fi

if begin 3 "compute-sanitizer"; then
  sanitizer=$(command -v compute-sanitizer || ls "${CUDA_PATH:-/usr/local/cuda}"/bin/compute-sanitizer 2>/dev/null)
  if ! $on_gpu || [[ -z $sanitizer ]]; then
    record memcheck skipped 0 "compute-sanitizer is not installed, or there is no GPU"
  else
    run memcheck 600 "$sanitizer" --tool=memcheck --target-processes=all --error-exitcode=9 "$programs/$gpu_tests"
  fi
fi

if begin 4 "link"; then
  run bandwidth 240 "$programs/bandwidth" --device="$device" --quick --json="$out/04_bandwidth.json"
fi

if begin 5 "training with checksums"; then
  for offload in none blocking pinion; do
    export PINION_VERIFY=1
    train "$offload" 180 "${small[@]}" --steps=5 --offload="$offload"
    unset PINION_VERIFY
  done
fi

if begin 6 "same bits"; then
  train compare 300 "${many[@]}" --compare
  json=$(log_of compare | sed 's/log$/json/')
  if [[ $verdict == passed ]]; then
    if grep -q '"bit_identical": false' "$json"; then
      amend failed "gradients or losses differ from those without offload"
    elif ! grep -q '"bit_identical": true' "$json"; then
      amend unknown "the run without offload does not repeat its own bits, so nothing can be said"
    fi
  fi
fi

if begin 7 "tensors of 512 MiB"; then
  for offload in none pinion; do
    train "$offload" 240 "${large[@]}" --dtype=bfloat16 --steps=5 --offload="$offload" --trace="$out/07_$offload.trace.json"
  done
fi

if begin 8 "caching allocator"; then
  for variant in PYTORCH_CUDA_ALLOC_CONF={expandable_segments:True,backend:cudaMallocAsync,garbage_collection_threshold:0.6,per_process_memory_fraction:0.05} \
    PYTORCH_NO_CUDA_MEMORY_CACHING=1; do
    export "${variant?}"
    train "${variant#PYTORCH_CUDA_ALLOC_CONF=}" 120 "${small[@]}" --steps=5
    unset "${variant%%=*}"
  done
fi

if begin 9 "offload under LibTorch"; then
  for program in "$programs"/offload_*_test; do
    [[ -e $program ]] && run "${program##*/}" 180 "$program"
  done
fi

if begin 10 "engine"; then
  run engine_bench 300 "$programs/engine_bench" --device="$device" --quick --json="$out/10_engine_bench.json"
fi

# Last: reports say that it may hang the GPU.
if begin 11 "batches"; then
  run batch_soak $((soak_seconds + 120)) "$programs/batch_soak" --device="${device%%:*}" --seconds="$soak_seconds"
fi

# --- The summary ---

bad=0
{
  printf '{"device": "%s", "cases": [' "$device"
  for i in "${!steps[@]}"; do
    [[ ${verdicts[i]} == failed || ${verdicts[i]} == timed-out || ${verdicts[i]} == not-run ]] && bad=$((bad + 1))
    printf '%s\n {"step": %d, "name": "%s", "verdict": "%s", "seconds": %d, "note": "%s"}' \
      "$([[ $i == 0 ]] || echo ,)" "${steps[i]}" "${names[i]}" "${verdicts[i]}" "${seconds[i]}" "${notes[i]}"
  done
  printf '\n]}\n'
} >"$out/summary.json"
echo "${#steps[@]} cases, $bad of them failed, timed out or were not run, in $SECONDS s; see $out/summary.txt" | tee -a "$out/summary.txt"
[[ $bad -eq 0 ]]
