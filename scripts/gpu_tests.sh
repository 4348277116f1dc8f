#!/usr/bin/env bash
# Build the CUDA kernels and test them on this machine's GPU.
#
#   bash scripts/gpu_tests.sh               build, tests/gpu, then the small ones under compute-sanitizer
#   bash scripts/gpu_tests.sh --no-sanitizer
#   PYTHON=/path/to/python bash scripts/gpu_tests.sh    an interpreter with a CUDA build of torch
#
# Needs nvcc and a CUDA build of torch 2.10 or newer; changes nothing but build output in the tree.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.."
# shellcheck source=scripts/launch/common.sh
. scripts/launch/common.sh # the checkout's .venv, where there is one
PYTHON=${PYTHON:-$MDCP_PYTHON}
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

"$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' ||
  die "$PYTHON finds no CUDA device through torch; set PYTHON to an interpreter with CUDA torch"
"$PYTHON" -c 'import torch; p = torch.cuda.get_device_properties(0); print(f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory >> 30} GiB, torch {torch.__version__}")'
git log -1 --format='commit %h' 2>/dev/null || true

MDCP_BUILD_CUDA=1 "$PYTHON" setup.py -q build_ext --inplace
"$PYTHON" -m pytest tests/gpu -q --durations=10

[ "${1:-}" = --no-sanitizer ] && exit 0
command -v compute-sanitizer >/dev/null ||
  die "compute-sanitizer is not on PATH (it comes with the CUDA toolkit); --no-sanitizer leaves it out"
for tool in memcheck racecheck synccheck initcheck; do
  echo "==> compute-sanitizer --tool $tool"
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 1 \
    --kernel-name-exclude kernel_substring=at:: \
    "$PYTHON" -m pytest tests/gpu -q -x -k small -p no:cacheprovider
done
