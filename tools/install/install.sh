#!/usr/bin/env bash
# ./bazelw run --config=opt //tools/install[:PART] -- DIR
# Copies the archives to DIR/lib, the headers to DIR/include/pinion and the CMake package to
# DIR/lib/cmake/Pinion. Deletes an earlier installation: parts of two versions do not fit together.
set -euo pipefail

die() { printf 'install: %s\n' "$*" >&2; exit 1; }
[[ $# -eq 1 && $1 != -* ]] ||
  die "takes one argument, the folder to install to: ... //tools/install -- /opt/pinion"

files=$0.runfiles/pinion/tools/install
[[ -d $files ]] || die "$files is missing: start it with ./bazelw run"
# Bazel starts the script elsewhere. Relative folders are relative to ./bazelw.
cd "${BUILD_WORKING_DIRECTORY:-.}"
mkdir -p "$1/lib/cmake/Pinion" || die "cannot write to $1: name another folder, or become its owner"
rm -rf "$1/include/pinion" "$1"/lib/libpinion{,_allocator,_engine,_hooks,_emulated}.a
cp -RL --no-preserve=all "$files"/*_part/. "$1"
cp -L --no-preserve=all "$files/PinionConfig.cmake" "$1/lib/cmake/Pinion"
# Only parts that include LibTorch have it.
release=$0.runfiles/libtorch/libtorch_release
[[ ! -e $release ]] || cp -L --no-preserve=all "$release" "$1/lib/cmake/Pinion"
prefix=$(cd "$1" && pwd)
archives=$(cd "$prefix/lib" && echo libpinion*.a)
echo "installed in $prefix: $archives; for CMake: -DCMAKE_PREFIX_PATH=$prefix"
