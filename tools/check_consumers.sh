#!/usr/bin/env bash
# Installs the library, and its allocator alone, into a temporary folder. Builds and runs the programs
# of examples/consumers as docs/users/install.md says. Fails if one fails. The programs find a host with
# ample RAM: on a full one their pools refuse memory, as they should.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
# Bazel's output folders are read-only.
trap 'chmod -R u+w "$work" && rm -rf "$work"' EXIT

die() { echo "check_consumers: $*" >&2; exit 1; }
say() { printf -- '--- %s (%ds)\n' "$*" "$SECONDS"; }

run_with_cmake() { # run_with_cmake CONSUMER CMAKE-ARGUMENTS...
  say "examples/consumers/$1"
  cmake -S "examples/consumers/$1" -B "$work/$1" -G Ninja --log-level=WARNING "${@:2}"
  cmake --build "$work/$1"
  "${with_ample_ram[@]}" "$work/$1/consumer"
}

# Without a server, which would outlive the temporary folder.
run_with_bazel() { # run_with_bazel COMMAND ARGUMENTS...
  bazel --batch --output_base="$work/bazel" "$@"
}

tools/install_packages.sh cmake ninja-build
./bazelw build --config=opt --noshow_progress //tests/support:roomy_host.so
cp bazel-bin/tests/support/roomy_host.so "$work"
with_ample_ram=(env LD_PRELOAD="$work/roomy_host.so")
say "//tools/install"
./bazelw run --config=opt --noshow_progress //tools/install -- "$work/pinion"
./bazelw run --config=opt --noshow_progress //tools/install:allocator -- "$work/allocator"

(
  unset TORCH_PATH CUDA_PATH
  run_with_cmake cmake_allocator -DCMAKE_PREFIX_PATH="$work/allocator"
)
# The includes of installed files, of the compiler's dependencies, and the program's libraries.
found=$({
  grep -rhE '^ *# *include' "$work/allocator/include"
  ninja -C "$work/cmake_allocator" -t deps | sed "s,$work,,; s,$PWD,,"
  ldd "$work/cmake_allocator/consumer"
} | grep -E '[</"](torch|c10|ATen|cuda|nvtx)|lib(torch|c10|cu|nv)') || true
[[ -z $found ]] || die "the allocator alone reaches LibTorch or CUDA: $found"

torch=${TORCH_PATH:-$(echo "$PWD"/.venv/lib/python3*/site-packages/torch)}
# Where a wheel came without CUDA's libraries, these stand in for them (python_with_torch.sh).
stubs=$PWD/.venv/torch-python/lib
run_with_cmake cmake -DCMAKE_PREFIX_PATH="$work/pinion" -DTORCH_PATH="$torch" -DCMAKE_EXE_LINKER_FLAGS="-Wl,-rpath-link,$stubs"
if [[ -e $torch/lib/libtorch_cuda.so ]]; then
  cmake --build "$work/cmake" --target cuda_consumer
  LD_LIBRARY_PATH=$stubs "${with_ample_ram[@]}" "$work/cmake/cuda_consumer"
  readelf -d "$work/cmake/cuda_consumer" | grep -q 'NEEDED.*libtorch_cuda.so' || die "Pinion::cuda lost libtorch_cuda"
fi
! readelf -d "$work/cmake/consumer" | grep 'NEEDED.*libtorch_cuda' || die "Pinion::pinion needs libraries of CUDA programs"
! ninja -C "$work/cmake" -t commands | grep -o -e '-D[A-Z]*NDEBUG[^ ]*' || die "Pinion's targets define NDEBUG"

say "parts that are not installed are named"
./bazelw run --config=opt --noshow_progress //tools/install:engine -- "$work/engine"
mkdir "$work/parts"
printf '%s\n' 'cmake_minimum_required(VERSION 3.18)' 'project(parts CXX)' \
  'find_package(Pinion REQUIRED COMPONENTS ${part})' >"$work/parts/CMakeLists.txt"
for part in hooks cuda; do
  said=$(cmake -S "$work/parts" -B "$work/parts/$part" -Dpart=$part -DCMAKE_PREFIX_PATH="$work/engine" -DTORCH_PATH="$torch" 2>&1) || true
  grep -q "no libpinion_hooks.a" <<<"$said" || die "$said"
done

say "headers of CUDA 12 beside CUDA 13's runtime are refused"
mkdir -p "$work/cuda/lib" "$work/cuda/include/crt"
touch "$work/cuda/lib/libcudart.so.13" "$work/cuda/include/crt/host_defines.h"
echo "#define CUDART_VERSION  12080" >"$work/cuda/include/cuda_runtime_api.h"
! cmake -S examples/consumers/cmake -B "$work/refused" -G Ninja --log-level=WARNING \
  -DCMAKE_PREFIX_PATH="$work/pinion" -DTORCH_PATH="$torch" -DCUDA_PATH="$work/cuda" 2>"$work/message" ||
  die "CMake takes CUDA 12's headers"
grep -q "Pinion's engine needs CUDA 13's runtime" "$work/message" || die "$(cat "$work/message")"

# Links all objects: each library is named, and no name is defined twice.
say "libpinion.a, linked by hand"
cudart=$(sed -n 's/^PINION_CUDART:[A-Z]*=//p' "$work/cmake/CMakeCache.txt")
g++ -o "$work/by_hand" "$(find "$work/cmake/CMakeFiles/consumer.dir" -name main.cc.o)" -L"$work/pinion/lib" \
  -Wl,--whole-archive -lpinion_emulated -lpinion -Wl,--no-whole-archive \
  -labsl_{statusor,status,str_format_internal,time,raw_hash_set,hash,strings,throw_delegate} \
  "$torch"/lib/lib{torch_cpu,c10}.so "$cudart" -Wl,-rpath,"$torch/lib:${cudart%/*}"
"${with_ample_ram[@]}" "$work/by_hand"

# Without its .bazelrc's optimisation the compiler is faster, and the check is the same.
say "examples/consumers/bazel"
cd examples/consumers/bazel
found=$(run_with_bazel query --noshow_progress \
  'kind(cc_binary, rdeps(//:all, @libtorch//... + @local_config_cuda//...))' | sort)
[[ $found == $'//:consumer\n//:cuda_consumer' ]] || die "LibTorch and CUDA are reached by: $found, not by //:consumer and //:cuda_consumer alone"
for consumer in allocator_consumer consumer cuda_consumer; do
  [[ $consumer != cuda_* || -e $torch/lib/libtorch_cuda.so ]] || continue
  run_with_bazel run --compilation_mode=fastbuild --noshow_progress --symlink_prefix=/ \
    --linkopt="-Wl,-rpath-link,$stubs" --run_under="${with_ample_ram[*]} LD_LIBRARY_PATH=$stubs" "//:$consumer"
done
say "done"
