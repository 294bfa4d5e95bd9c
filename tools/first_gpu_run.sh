#!/usr/bin/env bash
# The first half hour on a GPU: everything that only a GPU can show, in the order in which it is
# worth knowing, each command with a time limit of its own.
#
#   tools/first_gpu_run.sh                       in a checkout: builds the programs first
#   ./first_gpu_run.sh                           in a copy of //tools/portable's folder, beside a torch of the folder's release
#   tools/first_gpu_run.sh --device=emu:0        the same on the emulated device, with small sizes
#
#   --device=cuda:N        another GPU than the first
#   --out=DIRECTORY        where the results go; default: first_gpu_run_<date>
#   --programs=DIRECTORY   where the programs are; default: bin beside this file, else they are built
#   --steps=2,4,6          only these; default: all
#   --limit=SECONDS        a time limit for each command, instead of its own
#
# Leaves a log of each command, what the programs wrote, summary.txt and summary.json. Goes on after
# a failure; fails if anything failed. docs/results/first_gpu_run.md says how to read the results.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
device=cuda:0 out="" programs="" wanted="" limit=""
die() {
  echo "first_gpu_run: $*" >&2
  exit 2
}
for argument in "$@"; do
  case $argument in
  --device=*) device=${argument#*=} ;;
  --out=*) out=${argument#*=} ;;
  --programs=*) programs=${argument#*=} ;;
  --steps=*) wanted=${argument#*=} ;;
  --limit=*) limit=${argument#*=} ;;
  *)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    [[ $argument == --help ]] && exit
    die "unknown argument $argument"
    ;;
  esac
done
asked_for=$device
if [[ $device =~ ^cuda:(0|[1-9][0-9]*)$ ]]; then
  on_gpu=true
  number=${BASH_REMATCH[1]}
  if ((number > 0)); then
    # Some programs only know the first GPU: all programs see this one alone.
    if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
      IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
      ((number < ${#visible[@]})) || die "--device=$device: CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES has no such device"
      number=${visible[number]}
    fi
    export CUDA_VISIBLE_DEVICES=$number
    device=cuda:0
  fi
elif [[ $device == emu:0 ]]; then
  on_gpu=false
else
  die "--device=$device is neither cuda:N nor emu:0"
fi
[[ -z $limit || $limit =~ ^[1-9][0-9]*$ ]] || die "--limit=$limit: give whole seconds, 1 or more"
[[ -z $wanted || $wanted =~ ^([1-9]|1[01])(,([1-9]|1[01]))*$ ]] ||
  die "--steps=$wanted: the steps are 1 to 11, with commas between"
if [[ -n ${TORCH_PATH:-} ]]; then # the programs run in another folder
  TORCH_PATH=$(cd "$TORCH_PATH" 2>/dev/null && pwd) || die "TORCH_PATH is no folder"
fi

if [[ -z $programs ]]; then
  if [[ -d $here/bin ]]; then
    programs=$here/bin
  else
    (cd "$here/.." && ./bazelw build --config=portable //tools/portable) || exit
    programs=$here/../bazel-bin/tools/portable/portable/bin
    # The programs run with the LibTorch that they were built against.
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

clean() { # clean TEXT: as it may stand in a line and in a JSON string
  printf '%s' "$1" | tr '\n\t' '  ' | LC_ALL=C tr -cd ' -~' | tr -d '"\\' | cut -c 1-240
}

record() { # record NAME VERDICT SECONDS NOTE
  local name note
  name=$(clean "$1") note=$(clean "$4")
  verdict=$2
  steps+=("$step") names+=("$name") verdicts+=("$2") seconds+=("$3") notes+=("$note")
  printf '%2d  %-44s %-10s %5d s  %s\n' "$step" "$step_name: $name" "$2" "$3" "$note" | tee -a "$out/summary.txt"
}

log_of() { # log_of NAME: where a case of this step leaves its log
  printf '%s/%02d_%s.log' "$out" "$step" "${1//[^a-zA-Z0-9_.-]/_}"
}

last_words() { # the line of a log that says most: an error, else the last
  { grep -aE 'FAILED|[Ee]rror|abort|MISSED|terminate|out of memory' "$1" || grep -a . "$1"; } 2>/dev/null |
    tail -n 1 | cut -b 1-160
}

microseconds() { # sets `now_us`; SECONDS is rounded, and serves where bash is older than 5
  now_us=${EPOCHREALTIME:-$SECONDS.000000}
  now_us=${now_us/[^0-9]/}
}

# run NAME SECONDS COMMAND...: one case of a step. Sets `verdict`: passed, failed, timed-out, skipped;
# and `status`, the exit code.
# A process that hangs in the driver cannot be killed: after a while it is left behind.
run() {
  local name=$1 allowed=${limit:-$2} log started took group note now_us deadline_us
  shift 2
  status=""
  if [[ $device_answers == false ]]; then
    record "$name" not-run 0 "the device no longer answers"
    return
  fi
  log=$(log_of "$name")
  printf '%q ' "$@" >"${log%.log}.command"
  started=$SECONDS
  microseconds
  deadline_us=$((now_us + 1000000 * allowed))
  (cd "$out" && exec setsid "$@") >"$log" 2>&1 </dev/null &
  group=$!
  while kill -0 "$group" 2>/dev/null; do
    microseconds
    ((now_us < deadline_us)) || break
    sleep 0.1
  done
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
    record "$name" skipped "$took" "$(grep -aA 1 'Skipped' "$log" | tail -n 1)"
  else
    record "$name" passed "$took" ""
  fi
}

# Runs one test suite in its own process, which ends with the case.
one_suite() { # one_suite PROGRAM SUITE
  local said code
  said=$(timeout --foreground --kill-after=5 120 "$1" --gtest_filter="$2*" --gtest_brief=1 2>&1)
  code=$?
  sed 's/^/  /' <<<"$said"
  ((code == 0)) && echo "suite $2 passed" || echo "FAILED $2 (exit code $code)"
}
export -f one_suite

# Runs all suites, eight at a time, as one case, in the folder with other programs' answers.
run_suites() { # run_suites PROGRAM
  local log
  log=$(log_of "${1##*/}")
  run "${1##*/}" 300 bash -c 'set -o pipefail
    cd "$2" && "$1" --gtest_list_tests | grep -o "^[A-Za-z0-9_/]*[.]" |
      xargs -P 8 -I SUITE bash -c "one_suite \"\$@\"" _ "$1" SUITE' _ "$1" "$programs/../share"
  [[ $status == 0 ]] || return
  if grep -aq '^FAILED ' "$log"; then
    amend failed "$(grep -a '^FAILED ' "$log" | tr '\n' ' ')"
    ask_the_device
  else
    amend passed "$(grep -ac '^suite .* passed' "$log") suites"
  fi
}

ask_the_device() {
  $on_gpu || return 0
  command -v nvidia-smi >/dev/null || return 0
  timeout --kill-after=1 20 nvidia-smi >"$out/nvidia-smi_after_$(printf %02d "$step").txt" 2>&1 || device_answers=false
}

begin() { # begin NUMBER NAME: whether the step is wanted
  step=$1 step_name=$2
  [[ -z $wanted || ,$wanted, == *,"$1",* ]]
}

with=() # VARIABLE=VALUE of the train_gpt that comes next

train() { # train NAME SECONDS FLAGS...: train_gpt, its JSON beside the log
  local name=$1 allowed=$2
  shift 2
  run "$name" "$allowed" env "${with[@]}" "$programs/train_gpt" --device="$device" --json="$(log_of "$name" | sed 's/log$/json/')" "$@"
}

# Changes a verdict: the program's output says more than its exit code.
amend() { # amend VERDICT NOTE
  local note
  note=$(clean "$2")
  verdict=$1
  verdicts[-1]=$1 notes[-1]=$note
  printf '    %s: %s\n' "$1" "$note" | tee -a "$out/summary.txt"
}

bench() { # bench NAME SECONDS COMMAND...: a benchmark, which exits with 1 where it misses its goals
  run "$@"
  if [[ $status == 1 ]] && grep -aq '^MISSED' "$(log_of "$1")"; then
    amend missed "$(grep -a '^MISSED' "$(log_of "$1")" | sed 's/^MISSED *//')"
  fi
}

one_cuda_runtime() { # one_cuda_runtime FILE...: each what LD_DEBUG=libs says of a process
  local file found
  for file in "$@"; do
    [[ -e $file ]] || continue
    found=$(grep -ao 'calling init: .*libcudart[^ ]*' "$file" | sed 's/calling init: //' | sort -u)
    (($(wc -w <<<"$found") > 1)) && amend failed "two CUDA runtimes in one process: $found"
  done
}

# --- The steps ---

if $on_gpu; then
  gpu_tests=cuda_gpu_test
  many=() small=(--size=small) bench_model=() large=(--layers=2 --width=4096 --heads=32 --sequence=2048 --batch=32)
else
  gpu_tests=fake_cuda_conformance_test
  many=(--size=tiny) bench_model=(--size=tiny --rounds=2) small=(--size=tiny --device_memory=unlimited) large=("${small[@]}" --width=128)
fi

echo "first_gpu_run on $asked_for, results in $out" | tee "$out/summary.txt"
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
    grep -H . /sys/bus/pci/drivers/nvidia/*:*/{numa_node,current_link_speed,current_link_width}
  fi
} >"$out/machine.txt" 2>&1

if begin 1 "loader"; then
  for program in "$programs"/*; do
    name=${program##*/}
    # Some programs exit with 1 after --help. 127: the loader misses a library or a symbol, or the
    # launcher a LibTorch.
    run "$name" 60 sh -c 'LD_DEBUG=libs "$0" --help; [ $? -le 1 ]' "$program"
    log=$(log_of "$name")
    if [[ $verdict == failed ]]; then
      why=$(grep -aE "error while loading|symbol lookup error|^$name: " "$log" | head -n 1)
      [[ -z $why ]] || amend failed "$why"
    else
      one_cuda_runtime "$log"
    fi
  done
fi

if begin 2 "device tests"; then
  run "$gpu_tests" 300 "$programs/$gpu_tests"
fi

if begin 3 "compute-sanitizer"; then
  sanitizer=$(command -v compute-sanitizer || ls "${CUDA_PATH:-/usr/local/cuda}"/bin/compute-sanitizer 2>/dev/null)
  if ! $on_gpu || [[ -z $sanitizer ]]; then
    record memcheck skipped 0 "compute-sanitizer is not installed, or there is no GPU"
  else
    # Some tests provoke errors that a call reports.
    run memcheck 600 "$sanitizer" --tool=memcheck --target-processes=all --report-api-errors=no --error-exitcode=9 \
      "$programs/$gpu_tests"
  fi
fi

if begin 4 "link"; then
  bench bandwidth 240 "$programs/bandwidth" --device="$device" --quick --json="$out/04_bandwidth.json"
fi

if begin 5 "training with checksums"; then
  for offload in none blocking pinion planned; do
    with=(PINION_VERIFY=1)
    [[ $offload != none ]] || with+=(LD_DEBUG=libs "LD_DEBUG_OUTPUT=$out/05_libraries")
    train "$offload" 180 "${small[@]}" --steps=7 --offload="$offload"
    # In contrast to step 1 this process has loaded LibTorch's GPU libraries.
    [[ $offload != none || $verdict != passed ]] || one_cuda_runtime "$out"/05_libraries.*
  done
  with=()
fi

if begin 6 "same bits"; then
  train compare 300 "${many[@]}" --compare
  json=$(log_of compare | sed 's/log$/json/')
  if grep -qs '"bit_identical": false' "$json"; then
    amend failed "gradients or losses differ from those without offload"
  elif [[ $verdict == passed ]] && ! grep -qs '"bit_identical": true' "$json"; then
    amend unknown "the run without offload does not repeat its own bits, so nothing can be said"
  fi
fi

if begin 7 "tensors of 512 MiB"; then
  for offload in none pinion; do
    train "$offload" 240 "${large[@]}" --dtype=bfloat16 --steps=7 --offload="$offload" --trace="$out/07_$offload.trace.json"
  done
fi

if begin 8 "caching allocator"; then
  for variant in PYTORCH_CUDA_ALLOC_CONF={expandable_segments:True,backend:cudaMallocAsync,garbage_collection_threshold:0.6,per_process_memory_fraction:0.05} \
    PYTORCH_NO_CUDA_MEMORY_CACHING=1; do
    with=("$variant")
    train "${variant#PYTORCH_CUDA_ALLOC_CONF=}" 120 "${small[@]}" --steps=7
  done
  with=()
fi

if begin 9 "hooks under LibTorch"; then
  for program in "$programs"/{offload,weights}_*_test; do
    [[ -e $program ]] && run "${program##*/}" 180 "$program"
  done
  # On a GPU, all other tests of hooks. Without one they run as separate programs.
  if $on_gpu; then
    for program in "$programs"/*_tests; do
      [[ -e $program ]] && run_suites "$program"
    done
  fi
fi

if begin 10 "engine"; then
  bench engine_bench 300 "$programs/engine_bench" --device="$device" --quick --json="$out/10_engine_bench.json"
fi

if begin 11 "step by method"; then
  bench step_bench 300 "$programs/step_bench" --device="$device" "${bench_model[@]}" --json="$out/11_step_bench.json"
fi

# --- The summary ---

bad=0
{
  printf '{"device": "%s", "cases": [' "$asked_for"
  for i in "${!steps[@]}"; do
    case ${verdicts[i]} in
    failed | timed-out | not-run) bad=$((bad + 1)) ;;
    missed) ! $on_gpu || bad=$((bad + 1)) ;; # modelled times, or those of a busy host, are no finding
    esac
    printf '%s\n {"step": %d, "name": "%s", "verdict": "%s", "seconds": %d, "note": "%s"}' \
      "$([[ $i == 0 ]] || echo ,)" "${steps[i]}" "${names[i]}" "${verdicts[i]}" "${seconds[i]}" "${notes[i]}"
  done
  printf '\n]}\n'
} >"$out/summary.json"
echo "${#steps[@]} cases, $bad of them failed, missed a goal on a GPU, timed out or were not run, in $SECONDS s; see $out/summary.txt" | tee -a "$out/summary.txt"
[[ $bad -eq 0 ]]
