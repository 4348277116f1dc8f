#!/usr/bin/env bash
# Simulate the published comparison of the original DCP: 32 H200, 1.2B and 5B video transformers, 1-D
# and 2-D, short / balanced / long sets, 20 seeds. Prints one markdown page on stdout, progress on
# stderr. Everything is simulated; no GPU and no torch are needed.
#
#   bash scripts/reproduce/original_dcp.sh > original_dcp.md        # about 15 minutes of one core
#   SEEDS=2 bash scripts/reproduce/original_dcp.sh                  # a quick look
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/launch/common.sh
. scripts/launch/common.sh # the checkout's .venv, where there is one
exec "${PYTHON:-$MDCP_PYTHON}" -m scripts.reproduce.original_dcp \
  --seeds "${SEEDS:-20}" --flexsp-limit-s "${FLEXSP_LIMIT_S:-20}" "$@"
