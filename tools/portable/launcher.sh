#!/bin/sh
# Starts ../libexec/<the name of this file> with a LibTorch of the release that it was built for, and
# built for CUDA 13, such as PyPI's torch:
#   TORCH_PATH=/path/to/site-packages/torch bin/train_gpt --help
# Without TORCH_PATH, python3's torch.
set -eu
name=$(basename "$0")
folder=$(dirname "$(dirname "$(readlink -f "$0")")")
release=$(cat "$folder/share/libtorch_release") # "2.11"
remedy="set TORCH_PATH to the folder of a LibTorch $release with lib/libtorch_cpu.so in it, as site-packages/torch is"
die() { # with the loader's exit code
  printf '%s: %s; %s\n' "$name" "$1" "$remedy" >&2
  exit 127
}

torch=${TORCH_PATH:-}
if [ -z "$torch" ]; then
  torch=$(python3 -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])' 2>/dev/null) ||
    die "python3 finds no torch"
fi
[ -e "$torch/lib/libtorch_cpu.so" ] || die "$torch has no lib/libtorch_cpu.so"
# The wheel has its version in the first file, LibTorch's archive in the second.
for file in "$torch/version.py" "$torch/build-version"; do
  [ -e "$file" ] || continue
  grep -Eq "(^|[^0-9.])$release\." "$file" || die "$torch is of another version ($(grep -oE '[0-9]+\.[0-9]+\.[0-9]+' "$file" | head -n 1))"
done

cuda=
for candidate in "$torch/../nvidia/cu13/lib" "$torch/lib" "${CUDA_PATH:-/usr/local/cuda}/lib64"; do
  if [ -e "$candidate/libcudart.so.13" ]; then
    cuda=$candidate
    break
  fi
done
[ -n "$cuda" ] || die "$torch was not built for CUDA 13: libcudart.so.13 is neither with it nor in CUDA_PATH (${CUDA_PATH:-/usr/local/cuda})"

export LD_LIBRARY_PATH="$torch/lib:$cuda${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$folder/libexec/$name" "$@"
