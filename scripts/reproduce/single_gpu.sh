#!/usr/bin/env bash
# Step time of every strategy on 32 ranks, from one GPU: fits a cost profile on the device, runs each
# rank's share of every microbatch of the 32-rank plans one after another with real kernels and real
# memory, and adds communication modelled with the links of the device's hardware preset.
#
#   bash scripts/reproduce/single_gpu.sh                             gpt-1.3b, 128K context, about an hour
#   bash scripts/reproduce/single_gpu.sh --sets heavy --model gpt-7b more options of mdcp bench end-to-end
#   bash scripts/reproduce/single_gpu.sh --device cpu --quick        the same path, small, without a GPU
#   PYTHON=/path/to/python bash scripts/reproduce/single_gpu.sh      an interpreter with CUDA torch
#
# Leaves run directories and bench.json in runs/single_gpu (--out). Build the CUDA kernels first
# (MDCP_BUILD_CUDA=1 pip install, or the image): without them attention falls back to the CPU ops.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/launch/common.sh
. scripts/launch/common.sh # the checkout's .venv, where there is one
PYTHON=${PYTHON:-$MDCP_PYTHON}
die() { printf 'single_gpu.sh: %s\n' "$*" >&2; exit 1; }

shared=(--ranks 1 --settings "" --virtual-ranks 32 --out runs/single_gpu)
case " $* " in
  *" --device cpu "*) exec "$PYTHON" -m megatron_dcp bench end-to-end "${shared[@]}" "$@" ;;
esac
"$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' ||
  die "$PYTHON finds no CUDA device through torch. Set PYTHON to an interpreter with CUDA torch on a" \
    "machine with a GPU, or pass --device cpu to run the same path small on the CPU"
preset=$("$PYTHON" -c 'import torch; from megatron_dcp.runtime.autocost import device_hardware
print(device_hardware(torch.device("cuda")).name)')
"$PYTHON" -c 'import torch; p = torch.cuda.get_device_properties(0)
print(f"{p.name}, {p.total_memory >> 30} GiB, torch {torch.__version__}")' >&2
git log -1 --format='commit %h' >&2 2>/dev/null || true
exec "$PYTHON" -m megatron_dcp bench end-to-end "${shared[@]}" --device cuda --model gpt-1.3b \
  --hardware "$preset" --max-length 131072 --virtual-memory-tokens 16384 "$@"
