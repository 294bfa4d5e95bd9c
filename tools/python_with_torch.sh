#!/usr/bin/env bash
# Prints the path of a Python that can import torch and torch.testing's table of operators, from the
# .venv that ./bazelw has filled.
#
#   ./bazelw test --config=opt --test_env=PINION_TEST_PYTHON="$(tools/python_with_torch.sh)" //tests/shared/...
#
# Without a GPU ./bazelw installs the wheel without its CUDA libraries (a 3 GB download), although
# `import torch` needs their names. This script makes .venv/torch-python once: stub libraries whose
# functions trap, the packages that torch and its tests import, Captum without its plotting
# packages, and a Python that finds them. Host tensors and devices other than CUDA work.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=$PWD/.venv folder=$PWD/.venv/torch-python
die() { echo "python_with_torch.sh: $*" >&2; exit 1; }
imports() { [[ -x $1 ]] && "$1" -c "import $2" 2>/dev/null; } # imports PYTHON MODULES

if imports "$folder/python3" "torch, numpy, expecttest, sympy, tqdm, packaging, filelock, networkx" && [[ -d $folder/packages/captum ]]; then
  echo "$folder/python3"
  exit
fi
torch_libraries=("$venv"/lib/python3*/site-packages/torch/lib/*.so)
[[ -e ${torch_libraries[0]} ]] || die "no torch in .venv: run ./bazelw info without TORCH_PATH first"

# stub NAME VERSION: builds a library with the symbols that torch needs.
stub() {
  local name=$1 version=$2 prefix=${1#lib}
  prefix=${prefix%%[._]*}
  { grep -i "^$prefix" "$folder/undefined" || true; } | sed 's/@.*//' | sort -u |
    sed 's/.*/.globl &; .type &, @function; &: ud2/' >"$folder/stub.s"
  echo "$version { global: *; };" >"$folder/stub.lds"
  g++ -shared -nostdlib -Wl,-soname,"$name" -Wl,--version-script="$folder/stub.lds" \
    -o "$folder/lib/$name" -x assembler "$folder/stub.s"
}

rm -rf "$folder"
mkdir -p "$folder/lib"
if ! imports "$venv/bin/python3" torch; then
  nm -D --undefined-only "${torch_libraries[@]}" | awk '$1 == "U" { print $2 }' >"$folder/undefined"
  needed=$(readelf -dW "${torch_libraries[@]}" | sed -n 's/.*(NEEDED).*\[\(lib\(cu\|nv\|nccl\)[^]]*\)\]/\1/p' | sort -u)
  for name in $needed; do
    case $name in
    # Wheels contain these libraries; the driver's is loaded at run time.
    libcudart.so.* | libcupti.so.* | libcuda.so.*) continue ;;
    esac
    prefix=${name#lib}
    version=$({ grep -i "^${prefix%%[._]*}.*@" "$folder/undefined" || true; } | sed 's/.*@//' | sort -u | head -1)
    stub "$name" "$version"
  done
  rm -f "$folder"/undefined "$folder"/stub.*
fi

"$venv/bin/python3" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder/packages" \
  typing_extensions==4.16.0 numpy==2.3.5 expecttest==0.3.0 sympy==1.13.3 mpmath==1.3.0 \
  captum==0.9.0 tqdm==4.67.1 packaging==25.0 filelock==4.3.1 networkx==3.6.1 >&2 ||
  die "pip could not install what torch's tests and the oracles import (the lines above)"

cat >"$folder/python3" <<EOF
#!/usr/bin/env bash
export PYTHONPATH="$folder/packages\${PYTHONPATH:+:\$PYTHONPATH}"
export LD_LIBRARY_PATH="$folder/lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
exec "$venv/bin/python3" "\$@"
EOF
chmod +x "$folder/python3"
"$folder/python3" -c 'import torch, numpy, expecttest, sympy' || die "import torch still fails (the lines above)"
echo "$folder/python3"
