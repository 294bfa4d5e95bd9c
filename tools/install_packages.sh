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
elif command -v sudo >/dev/null && { [[ -t 0 ]] || sudo -n true 2>/dev/null; }; then
  as_root=(sudo) # asks for the password where somebody can type it
else
  die "missing Debian packages, and neither root nor sudo without a password is available. Ask an administrator to run: apt-get install ${missing[*]}"
fi

printf 'installing Debian packages: %s\n' "${missing[*]}" >&2
"${as_root[@]}" true || die "sudo refused; needed to install ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt() { # a fresh machine's own updater may hold the lock for a while
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 "$@" >>"$log" 2>&1
}
{ apt update && apt install -y --no-install-recommends "${missing[@]}"; } ||
  die "apt-get could not install ${missing[*]}: $(grep -E '^E:' "$log" | head -1)"
