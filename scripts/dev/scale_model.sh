#!/usr/bin/env bash
# Run a job on several "hosts" of this machine whose links have a real, limited speed: network
# namespaces, each joined to a switch by a veth pair under `tc tbf`. Root only (Linux, iproute2).
#
#   scripts/dev/scale_model.sh [-n HOSTS] [-r RANKS] [-b RATE] [-o DIR] train [mdcp train options]
#   scripts/dev/scale_model.sh [-n HOSTS] [-r RANKS] [-b RATE] [-o DIR] path/to/script.py [options]
#
#   -n HOSTS   how many hosts (default 2)
#   -r RANKS   ranks on each (default 1)
#   -b RATE    of each link, each way, as tc writes it: 1gbit, 200mbit ... (default 1gbit)
#   -o DIR     where the output of every host goes, DIR/host0.log ... (default: a temporary folder)
#
# Every host runs scripts/launch/torchrun.sh. Host 0's output is shown. Exit status: that of the
# first host that failed, 0 when none did. Namespaces, links and processes are removed at the end.
set -euo pipefail
# shellcheck source=scripts/launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../launch/common.sh"
case ${1:-} in -h | --help | "") launch_help "$0"; exit 0 ;; esac

hosts=2 ranks=1 rate=1gbit out=""
while getopts n:r:b:o: option; do
  case $option in
    n) hosts=$OPTARG ;;
    r) ranks=$OPTARG ;;
    b) rate=$OPTARG ;;
    o) out=$OPTARG ;;
    *) launch_die "see --help" ;;
  esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || launch_die "a command is needed; see --help"
[[ $hosts =~ ^[1-9][0-9]?$ ]] || launch_die "-n $hosts: 1 to 99 hosts"
for tool in ip tc; do
  command -v $tool >/dev/null 2>&1 || launch_die "$tool not found: install iproute2"
done
[ "$(id -u)" -eq 0 ] || launch_die "network namespaces need root: run it with sudo, or use 'mdcp train --link-mbytes-per-s', which paces messages without them"

tag=mdcp$$ switch=mdcp$$s
[ -n "$out" ] || out=$(mktemp -d "${TMPDIR:-/tmp}/scale_model.XXXXXX")
mkdir -p "$out"
pids=()
# shellcheck disable=SC2329 # the trap below calls it
clean() {
  local pid i
  for pid in "${pids[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
  for ((i = 0; i < hosts; i++)); do ip netns del "$tag$i" 2>/dev/null || true; done
  ip netns del "$switch" 2>/dev/null || true
}
trap clean EXIT
trap 'exit 130' INT TERM

ip netns add "$switch" || launch_die "network namespaces cannot be made here (a container without CAP_SYS_ADMIN?)"
ip -n "$switch" link add br0 type bridge
ip -n "$switch" link set br0 up
# The bucket holds what a link carries in a few milliseconds; less and tc cannot reach the rate.
shape() { tc -n "$1" qdisc add dev "$2" root tbf rate "$rate" burst 256kb latency 50ms; }
for ((i = 0; i < hosts; i++)); do
  host=$tag$i
  ip netns add "$host"
  ip link add eth0 netns "$host" type veth peer name "port$i" netns "$switch"
  ip -n "$host" addr add "10.92.0.$((i + 1))/24" dev eth0
  ip -n "$host" link set lo up
  ip -n "$host" link set eth0 up
  ip -n "$switch" link set "port$i" master br0 up
  shape "$host" eth0 || launch_die "tc cannot shape to $rate here (kernel without sch_tbf, or a rate that tc does not know)"
  shape "$switch" "port$i"
done

set -m # each host gets a process group of its own, so that none of its ranks is left behind
for ((i = 0; i < hosts; i++)); do
  MDCP_RANKS_PER_NODE=$ranks MDCP_IFNAME=eth0 MDCP_NODE_ADDR=10.92.0.$((i + 1)) \
    MDCP_PYTHON=$MDCP_PYTHON PYTHONPATH=$LAUNCH_ROOT${PYTHONPATH:+:$PYTHONPATH} \
    ip netns exec "$tag$i" "$LAUNCH_ROOT/scripts/launch/torchrun.sh" \
    --nodes "$hosts" --head 10.92.0.1:29400 "$@" >"$out/host$i.log" 2>&1 &
  pids+=($!)
done
set +m
status=0
for pid in "${pids[@]}"; do
  wait "$pid" || { code=$?; [ "$status" -ne 0 ] || status=$code; }
done
cat "$out/host0.log"
[ "$status" -eq 0 ] || printf '%s: status %s; output of all hosts in %s\n' "${0##*/}" "$status" "$out" >&2
exit "$status"
