#!/usr/bin/env bash
# Run a command of mdcp, or a training script, on this machine alone.
#
#   scripts/launch/local.sh [-n RANKS] train [mdcp train options]
#   scripts/launch/local.sh [-n RANKS] path/to/script.py [its options]
#
# RANKS defaults to the number of GPUs, or 2 on a machine without one (gloo). Environment:
#   MDCP_PYTHON   interpreter to use (default: the checkout's .venv, else python3)
set -euo pipefail
# shellcheck source=scripts/launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
case ${1:-} in -h | --help | "") launch_help "$0"; exit 0 ;; esac

if [ "$1" = -n ]; then
  [ $# -ge 3 ] || launch_die "-n needs a number and a command; see --help"
  ranks=$2; shift 2
else
  ranks=$(launch_ranks_per_node 2)
fi
case $1 in *.py) program=("$@") ;; *) program=(-m megatron_dcp "$@") ;; esac
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$MDCP_PYTHON" -m megatron_dcp.cli.elastic --standalone --nnodes 1 --nproc-per-node "$ranks" "${program[@]}"
