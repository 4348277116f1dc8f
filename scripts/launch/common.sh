# shellcheck shell=bash
# Shared by the launch scripts: where Python is, and which network interface to use. Sets environment
# only; the planning and the training are in Python.

LAUNCH_ROOT=${MDCP_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)}

# Python: MDCP_PYTHON, else the checkout's .venv, else what is on the PATH (containers).
if [ -z "${MDCP_PYTHON:-}" ]; then
  MDCP_PYTHON=$LAUNCH_ROOT/.venv/bin/python
  [ -x "$MDCP_PYTHON" ] || MDCP_PYTHON=python3
fi

launch_help() { awk 'NR > 1 && /^#/ { sub(/^# ?/, ""); print; next } NR > 1 { exit }' "$1"; }
launch_die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 2; }

# MDCP_RANKS_PER_NODE, else the GPUs that are seen here, else $1 ranks (gloo on the CPU), which is said:
# a job that forgot to ask for GPUs sees none.
launch_ranks_per_node() {
  if [ -n "${MDCP_RANKS_PER_NODE:-}" ]; then echo "$MDCP_RANKS_PER_NODE"; return; fi
  local gpus=0
  if command -v nvidia-smi >/dev/null 2>&1; then gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || gpus=0; fi
  if [ "$gpus" -gt 0 ]; then echo "$gpus"; return; fi
  printf 'mdcp: %s sees no GPU (nvidia-smi); ranks here: %s (MDCP_RANKS_PER_NODE changes it)\n' "${HOSTNAME:-this node}" "$1" >&2
  echo "$1"
}

# Whether an IP address is one of this host's.
launch_own_address() {
  command -v ip >/dev/null 2>&1 || return 1
  ip -o addr show | awk -v want="$1" '{split($4, a, "/"); if (a[1] == want) found = 1} END {exit !found}'
}

# The interface of the default route carries rendezvous and gloo; NCCL finds its own rails (IB, RoCE)
# and needs a name only for its bootstrap socket. Both are left alone when the caller has set them.
launch_network() {
  local device=${MDCP_IFNAME:-}
  if [ -z "$device" ] && command -v ip >/dev/null 2>&1; then
    device=$(ip -o route show default 2>/dev/null | awk '{for (i = 1; i < NF; i++) if ($i == "dev") {print $(i + 1); exit}}')
  fi
  [ -n "$device" ] || return 0
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$device}
  export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$device}
}
