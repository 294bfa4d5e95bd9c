#!/usr/bin/env bash
# Builds //device/cuda/... with the wheels that ./bazelw installs: as on a machine whose /usr/local/cuda is a
# CUDA Toolkit 12 (if this machine has the folder), and as on a machine without a toolkit. A mount namespace
# hides this machine's toolkit; without one the check is skipped with status 77.
# README's first command builds //examples:train_gpt, which takes minutes more: all layers, with LibTorch's
# headers. It is analysed, as all else is, so that whatever looks for CUDA finds the wheels.
# The wheels are those in .venv, since to install them again would be a download of 0.5 GB. Exception: the
# smallest one, which holds headers of CUDA, is installed into an empty .venv.
# Before that, checks which bazel and which folder for sandboxes ./bazelw takes on other machines.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

toolkits=()
for folder in /usr/local/cuda /usr/local/cuda-13 /usr/local/cuda-13.0 /usr/local/include; do
  [[ ! -d $folder ]] || toolkits+=("$(readlink -f "$folder")")
done
hide=(unshare --mount)
[[ $EUID == 0 ]] || hide+=(--map-root-user)
if ! "${hide[@]}" true; then
  echo "check_without_toolkit: skipped: this user may have no mount namespace"
  exit 77
fi

work=$(mktemp -d)
# Bazel's output folders are read-only.
trap 'chmod -R u+w "$work" && rm -rf "$work"' EXIT

# Programs in place of /usr/bin/bazel and of the first bazel on PATH, which print their name and arguments.
for place in usr path; do
  mkdir "$work/$place"
  printf '#!/bin/sh\n[ "$1" = --version ] && echo "bazel $%s_version" || echo "%s $*"\n' $place $place >"$work/$place/bazel"
  chmod +x "$work/$place/bazel"
done
[[ ! -e /usr/bin/bazel ]] || PATH=$work/path:$PATH PINION_SKIP_INSTALL=1 "${hide[@]}" bash -euo pipefail -c '
  mount --bind "$1" /usr/bin/bazel
  in_memory=" --bazelrc=tools/sandbox_in_memory.bazelrc"
  expect() { # expect TEXT, of ./bazelw help
    local said
    said=$(./bazelw help 2>&1) || true
    [[ $said == "$1"* ]] || { echo "check_without_toolkit: ./bazelw said: $said; expected: $1"; exit 1; }
  }
  export usr_version=no_version path_version=9.0.0
  for options in size=3g size=1g size=3g,noexec size=3g,ro; do
    mount -t tmpfs -o "$options" tmpfs /dev/shm
    [[ $options == size=3g ]] && expect "usr$in_memory help" || expect "usr help"
  done
  usr_version=4.2.3 expect "usr help"
  usr_version=8.0.0 path_version=4.2.4 expect "path help"
  usr_version=8.0.0 expect "bazelw: $(type -P bazel) is bazel 9.0.0, and Pinion builds with Bazel 4: apt-get install"
' choose "$work/usr/bazel"

# A .venv of before a wheel was needed has no marker of it. This one is empty besides.
mkdir -p "$work/fresh/.venv"
cp -r bazelw tools "$work/fresh"
for marker in .venv/pinion-*; do
  [[ $marker == *cuda-crt* ]] || touch "$work/fresh/$marker"
done
"$work/fresh/bazelw" --batch --output_base="$work/help" help >/dev/null
[[ -e $(echo "$work"/fresh/.venv/lib/python3*/site-packages/nvidia/cu13/include/crt/host_defines.h) ]]

# Runs as a user other than root if possible, in a clone with an empty home.
tree=$PWD
as_user=""
if [[ $EUID == 0 ]] && command -v setpriv >/dev/null; then
  tree=$work/pinion
  git -c safe.directory='*' clone --quiet . "$tree"
  mkdir "$work/home" "$work/venv"
  ln -s "$work/venv" "$tree/.venv"
  chown -R 65534:65534 "$work"
  as_user="setpriv --reuid=65534 --regid=65534 --clear-groups env HOME=$work/home"
fi

# A separate server: the usual one would see the toolkit.
AS_USER=$as_user "${hide[@]}" bash -euo pipefail -c '
  work=$1 tree=$2
  shift 2
  [[ $tree == "$PWD" ]] || mount --bind .venv "$work/venv"
  cd "$tree"
  for folder; do mount -t tmpfs none "$folder"; done
  [[ ! -e /usr/local/cuda/include && ! -e /usr/local/include/crt ]]
  unset CUDA_PATH
  takes_the_wheels() {
    bazel_build() { $AS_USER ./bazelw --batch --output_base="$work/bazel" build --noshow_progress --config=opt "$@"; }
    bazel_build //device/cuda/...
    bazel_build --nobuild //examples:train_gpt //...
    [[ $(readlink -f "$work/bazel/external/local_config_cuda/include") == "$(readlink -f .venv)"/* ]]
  }
  if [[ -d /usr/local/cuda ]]; then
    # First: the files of the second case would help this one.
    mkdir -p /usr/local/cuda/include/crt
    echo "#define __host__" >/usr/local/cuda/include/crt/host_defines.h
    echo "#define CUDART_VERSION  12080" >/usr/local/cuda/include/cuda_runtime_api.h
    takes_the_wheels
    rm -r /usr/local/cuda/include
  fi
  takes_the_wheels
' hide "$work" "$tree" "${toolkits[@]}"
