#!/usr/bin/env bash
# Set up, build, and train a small GPT on real text of very different lengths, on this machine's CPUs:
# the same samples under three strategies, then a scale model of a cluster, then virtual ranks.
#
#   bash scripts/quickstart.sh            everything (under 4 minutes after installation on 2 cores)
#   bash scripts/quickstart.sh --short    one repeat, no virtual ranks
#
# Results: runs/quickstart (scale model across nodes), runs/quickstart-unpaced, and
# runs/quickstart-virtual8 and -virtual32; each with summary.json, plans, events and a timeline.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
# shellcheck source=scripts/env.sh
. "$(dirname "$0")/env.sh"
mdcp_env base
cd "$MDCP_ROOT"
short=()
[ "${1:-}" != --short ] || short=(--repeats 1 --no-virtual)
export OMP_NUM_THREADS=1
begin=$SECONDS
mdcp_say "training on 2 ranks (gloo), one core each"
"$PY" -m torch.distributed.run --standalone --nnodes 1 --nproc-per-node 2 -m megatron_dcp train \
  --suite quickstart --out runs "${short[@]}" \
  || mdcp_die "the run failed; its message is above"
mdcp_say "done in $((SECONDS - begin)) s"
