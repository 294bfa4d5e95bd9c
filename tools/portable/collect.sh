#!/usr/bin/env bash
# collect.sh FOLDER LAUNCHER PLACE=FILE...: fills FOLDER for //tools/portable.
#   libexec=PROGRAM   the program, and a launcher of its name in bin/
#   lib=LIBRARY       a shared library
#   share...=FILE     data
#   .=FILE            a script, beside bin/
# Copies the libraries that these load to lib/. Exceptions: LibTorch, which the target machine has,
# and the C and C++ runtimes of every Linux.
set -euo pipefail

folder=$1 launcher=$2
shift 2
mkdir -p "$folder"/{bin,lib,libexec,share}
for argument in "$@"; do
  place=${argument%%=*} file=${argument#*=}
  mkdir -p "$folder/$place"
  cp -L "$file" "$folder/$place/"
  [[ $place == libexec ]] && cp -L "$launcher" "$folder/bin/${file##*/}"
  [[ $place == share* || $place == . ]] && continue
  # A library that ldd does not find is skipped, too: the test runs the collected programs.
  ldd "$file" | awk '$3 ~ /^\// { print $3 }'
done | sort -u | while read -r library; do
  case ${library##*/} in
  libc10* | libtorch* | libgomp.so* | libcu*.so* | libnv*.so*) ;;
  libc.so* | libm.so* | libdl.so* | libpthread.so* | librt.so* | libutil.so* | libgcc_s.so* | libstdc++.so*) ;;
  *) cp -L "$library" "$folder/lib/" ;;
  esac
done
chmod -R u+w,a+rX "$folder"
chmod a+x "$folder"/bin/* "$folder"/libexec/*
