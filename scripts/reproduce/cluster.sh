#!/usr/bin/env bash
# The table of 32 GPUs: every strategy on the same samples over real links, interleaved. Start it on
# every node, or hand it to Slurm:
#
#   bash scripts/reproduce/cluster.sh --nodes 4 --head HOST[:PORT] [options of mdcp bench end-to-end]
#   bash scripts/reproduce/cluster.sh --slurm --nodes 4 [options]      submits one job of 4 nodes
#
# gpt-1.3b, 128K context, 16K tokens per GPU without recompute; links inside a node and across nodes
# from the GPU's hardware preset. Environment: those of scripts/launch/torchrun.sh (MDCP_PYTHON,
# MDCP_RANKS_PER_NODE, MDCP_IFNAME); MDCP_HARDWARE names the preset where this machine has no GPU
# (submitting from a login node). Rank 0's node gets run directories and bench.json in runs/cluster.
set -euo pipefail
# shellcheck source=scripts/launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../launch/common.sh"
case ${1:-} in -h | --help) launch_help "$0"; exit 0 ;; esac
slurm="" nodes="" head=""
while [ $# -gt 0 ]; do
  case $1 in
    --slurm) slurm=1; shift ;;
    --nodes) nodes=${2:?--nodes needs a number}; shift 2 ;;
    --head) head=${2:?--head needs a host}; shift 2 ;;
    *) break ;;
  esac
done
if [ -z "$nodes" ] || [ -z "$slurm$head" ]; then
  launch_die "--nodes N and --head HOST (or --slurm) are needed; see --help"
fi
cd "$LAUNCH_ROOT"

if [ -n "${MDCP_HARDWARE:-}" ]; then
  preset=$MDCP_HARDWARE gpus=${MDCP_RANKS_PER_NODE:-8}
else
  "$MDCP_PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' ||
    launch_die "$MDCP_PYTHON finds no CUDA device through torch here: run it on the GPU nodes, or name" \
      "their preset (MDCP_HARDWARE=h100) to submit from another machine. One GPU alone:" \
      "scripts/reproduce/single_gpu.sh"
  preset=$("$MDCP_PYTHON" -c 'import torch; from megatron_dcp.runtime.autocost import device_hardware
print(device_hardware(torch.device("cuda")).name)')
  gpus=$(launch_ranks_per_node 1)
fi
bench=(bench end-to-end --ranks $((nodes * gpus)) --device cuda --model gpt-1.3b --settings network
  --virtual-ranks "" --hardware "$preset" --max-length 131072 --memory-tokens 16384 --out runs/cluster "$@")
if [ -n "$slurm" ]; then
  exec sbatch -N "$nodes" scripts/launch/slurm.sbatch "${bench[@]}"
fi
exec bash scripts/launch/torchrun.sh --nodes "$nodes" --head "$head" "${bench[@]}"
