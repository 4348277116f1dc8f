#!/usr/bin/env bash
# Make the venv that holds the second megatron-core (constraints.txt, `own-venv:`), once, and print
# the path of its python. It shares torch and all else with the interpreter that it is given.
#
#   bash scripts/env_megatron.sh [PYTHON]      PYTHON: the base interpreter, default python3
#
# From 0.17 on megatron-core declares Python 3.12 while its wheels run on 3.11, and it must not pull
# packages of its own: hence --ignore-requires-python --no-deps. The venv lies in a cache folder
# outside the checkout, named by the pin and the base interpreter.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
base=${1:-python3}
pin=$(sed -n 's/^# *own-venv: *//p' "$root/constraints.txt")
[ -n "$pin" ] || { echo "error: constraints.txt has no line '#   own-venv: PACKAGE==VERSION'" >&2; exit 1; }
packages=$("$base" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
key=$({ echo "$pin"; echo "$packages"; "$base" -VV; } | sha256sum | cut -c1-16)
cache=${MDCP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron-dcp}
venv=$cache/megatron-$key
mkdir -p "$cache"
exec 9>"$cache/megatron.lock"
flock 9
if [ ! -e "$venv/.ready" ]; then
  echo "==> making $venv with $pin" >&2
  rm -rf "$venv"
  "$base" -m venv --without-pip "$venv"
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  echo "$packages" >"$site/base-packages.pth"
  "$base" -m pip --python "$venv/bin/python" install --quiet --no-deps --ignore-requires-python "$pin" >&2
  touch "$venv/.ready"
fi
echo "$venv/bin/python"
