#!/usr/bin/env bash
# collect.sh FOLDER ARCHIVE AR FILE...: puts objects among the files into FOLDER/lib/ARCHIVE and headers
# into FOLDER/include, for the rule pinion_part.
set -euo pipefail

folder=$1 archive=$2 ar=$3
shift 3
mkdir -p "$folder"/{lib,include}
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
for file in "$@"; do
  case $file in
  *.o)
    # bazel-out/.../bin/allocator/ram/_objs/one_file/one_file.pic.o is allocator-ram-one_file.o, a
    # name that no other member has.
    package=${file#*/bin/}
    package=${package%%/_objs/*}
    name=${file##*/}
    cp "$file" "$objects/${package//\//-}-${name%.pic.o}.o"
    ;;
  *)
    header=${file#*/_virtual_includes/*/}
    mkdir -p "$folder/include/${header%/*}"
    cp -L "$file" "$folder/include/$header"
    ;;
  esac
done
"$ar" rcsD "$folder/lib/$archive" "$objects"/*.o
chmod -R u+w,a+rX "$folder"
