#!/usr/bin/env bash
# Run one node's share of a multi-node job with torchrun's rendezvous: start it on every node.
#
#   scripts/launch/torchrun.sh --nodes N --head HOST[:PORT] train [mdcp train options]
#   scripts/launch/torchrun.sh --nodes N --head HOST[:PORT] path/to/script.py [its options]
#
# HOST is the node that the others can reach; PORT defaults to 29400. Environment:
#   MDCP_RANKS_PER_NODE   ranks on this node (default: its GPUs, or 1)
#   MDCP_IFNAME           network interface of the rendezvous and gloo (default: of the default route)
#   MDCP_JOB_ID           the same word on all nodes (default: mdcp)
#   MDCP_MAX_RESTARTS     restarts after a failed rank (default: 0)
#   MDCP_NODE_ADDR        address at which the other nodes reach this one (default: its host name)
#
# Exit status: 0 done, 85 preempted after a checkpoint (run it again with --resume), 1 failed.
set -euo pipefail
# shellcheck source=scripts/launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
case ${1:-} in -h | --help | "") launch_help "$0"; exit 0 ;; esac

nodes="" head=""
while [ $# -gt 0 ]; do
  case $1 in
    --nodes) nodes=${2:?--nodes needs a number}; shift 2 ;;
    --head) head=${2:?--head needs a host}; shift 2 ;;
    *) break ;;
  esac
done
[ -n "$nodes" ] && [ -n "$head" ] && [ $# -gt 0 ] || launch_die "--nodes, --head and a command are needed; see --help"
case $head in *:*) ;; *) head=$head:29400 ;; esac
case $1 in *.py) program=("$@") ;; *) program=(-m megatron_dcp "$@") ;; esac

launch_network
# torchrun knows the head by its host name only. Given an address of this host (of a second network,
# say), it has to be told; a loopback address is every host's own, there it finds out by trying.
role=()
case ${head%:*} in
  127.* | localhost) ;;
  *) if launch_own_address "${head%:*}"; then role=(--rdzv-conf is_host=1); fi ;;
esac
# A preemption signal is for the ranks, which install a handler of their own; torchrun ignores it.
trap '' USR1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$MDCP_PYTHON" -m megatron_dcp.cli.elastic \
  --nnodes "$nodes" --nproc-per-node "$(launch_ranks_per_node 1)" \
  --rdzv-backend c10d --rdzv-endpoint "$head" --rdzv-id "${MDCP_JOB_ID:-mdcp}" "${role[@]}" \
  --max-restarts "${MDCP_MAX_RESTARTS:-0}" ${MDCP_NODE_ADDR:+--local-addr "$MDCP_NODE_ADDR"} "${program[@]}"
