#!/usr/bin/env bash
# A real Slurm on one machine, as two nodes n1 and n2, for the tests. No systemd; pid files only.
#
#   scripts/dev/slurm_local.sh up      start munged, slurmctld and two slurmd; print the SLURM_CONF
#   scripts/dev/slurm_local.sh down    stop what `up` started
#   scripts/dev/slurm_local.sh status  exit 0 when both nodes are idle or in use
#
# Needs root and Debian's packages slurm-wlm and munge. State lives in $MDCP_SLURM_DIR
# (default: $TMPDIR/mdcp-slurm); ports 16817, 17001 and 17002 on loopback.
set -euo pipefail

DIR=${MDCP_SLURM_DIR:-${TMPDIR:-/tmp}/mdcp-slurm}
export SLURM_CONF=$DIR/slurm.conf

die() { printf 'slurm_local: %s\n' "$*" >&2; exit 1; }

need() {
  [ "$(id -u)" -eq 0 ] || die "needs root (slurmd starts jobs as other users)"
  local tool
  for tool in slurmctld slurmd sbatch munged; do
    command -v "$tool" >/dev/null || die "$tool not found; install slurm-wlm and munge"
  done
}

write_conf() {
  mkdir -p "$DIR"/{ctld,d1,d2,log,munge}
  local cpus memory
  cpus=$(nproc)
  memory=$(awk '/MemTotal/ {print int($2 * 0.9 / 1024)}' /proc/meminfo)
  cat >"$SLURM_CONF" <<CONF
ClusterName=mdcp
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=16817
AuthType=auth/munge
AuthInfo=socket=$DIR/munge/munge.socket,cred_expire=10
CredType=cred/munge
SlurmUser=root
StateSaveLocation=$DIR/ctld
SlurmdSpoolDir=$DIR/%n
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/%n.pid
SlurmctldLogFile=$DIR/log/ctld.log
SlurmdLogFile=$DIR/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=60
KillWait=60
MpiDefault=none
JobRequeue=1
NodeName=n1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=17001 CPUs=$cpus RealMemory=$memory
NodeName=n2 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=17002 CPUs=$cpus RealMemory=$memory
PartitionName=test Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
CONF
}

start_munge() {
  [ -f "$DIR/munge/munge.key" ] || { dd if=/dev/urandom of="$DIR/munge/munge.key" bs=1024 count=1 status=none; }
  chmod 700 "$DIR/munge"; chmod 400 "$DIR/munge/munge.key"; chmod 755 "$DIR" "$DIR/munge"
  munged --force --key-file="$DIR/munge/munge.key" --socket="$DIR/munge/munge.socket" \
    --pid-file="$DIR/munge/munged.pid" --log-file="$DIR/log/munged.log" \
    --seed-file="$DIR/munge/munge.seed"
}

up() {
  need
  if status 2>/dev/null; then printf '%s\n' "$SLURM_CONF"; return; fi
  down
  write_conf
  start_munge
  slurmctld -f "$SLURM_CONF" -c
  local node
  for node in n1 n2; do slurmd -N "$node" -f "$SLURM_CONF"; done
  for _ in $(seq 60); do
    status && { printf '%s\n' "$SLURM_CONF"; return; }
    sleep 0.5
  done
  tail -n 5 "$DIR"/log/*.log >&2
  die "the nodes did not come up; the logs are in $DIR/log"
}

status() {
  # Without a controller sinfo would wait a minute for one.
  [ -f "$DIR/slurmctld.pid" ] && kill -0 "$(cat "$DIR/slurmctld.pid")" 2>/dev/null || return 1
  [ "$(sinfo -h -o '%T' -n n1,n2 -N 2>/dev/null | grep -cE '^(idle|allocated|mixed|completing)$')" -eq 2 ]
}

down() {
  local file pid
  for file in "$DIR"/n1.pid "$DIR"/n2.pid "$DIR"/slurmctld.pid "$DIR"/munge/munged.pid; do
    [ -f "$file" ] || continue
    pid=$(cat "$file")
    kill "$pid" 2>/dev/null || continue
    for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
    kill -9 "$pid" 2>/dev/null || true
  done
  rm -rf "$DIR"
}

case ${1:-} in
  up) up ;;
  down) down ;;
  status) status ;;
  *) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
