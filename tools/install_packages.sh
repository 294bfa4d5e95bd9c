#!/usr/bin/env bash
# Installs the Debian packages named as arguments that are missing. Says what it does; fails with
# one line when it may not.
set -euo pipefail

die() { printf 'install_packages: %s\n' "$*" >&2; exit 1; }

command -v dpkg-query >/dev/null || die "this is not a Debian system (no dpkg-query): install the equivalents of: $*"

missing=()
for package in "$@"; do
  dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
[[ ${#missing[@]} -eq 0 ]] && exit 0

if [[ $EUID -eq 0 ]]; then
  as_root=()
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
  as_root=(sudo -n)
else
  die "missing Debian packages, and neither root nor password-less sudo is available. Ask an administrator to run: apt-get install ${missing[*]}"
fi

printf 'installing Debian packages: %s\n' "${missing[*]}" >&2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
{ "${as_root[@]}" apt-get update -qq &&
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 ||
  die "apt-get could not install ${missing[*]}: $(grep -E '^(E|W):' "$log" | head -1)"
