#!/usr/bin/env bash
# Set up what is missing, then run every check and the whole test suite.
#
#   bash scripts/test.sh              everything CI runs
#   bash scripts/test.sh --nightly    the slow extras as well
#   bash scripts/test.sh tests/unit   pytest arguments are passed on (checks are skipped)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
# shellcheck source=scripts/env.sh
. "$(dirname "$0")/env.sh"
mdcp_env base test
cd "$MDCP_ROOT"

nightly=(-m "not nightly")
if [ "${1:-}" = --nightly ]; then nightly=(); shift; fi

if [ $# -eq 0 ]; then
  mdcp_say "ruff"; "$PY" -m ruff check .; "$PY" -m ruff format --check .
  mdcp_say "mypy"; "$PY" -m mypy
  mdcp_say "import layers"; "$PY" -c 'from importlinter.cli import lint_imports; raise SystemExit(lint_imports())'
  mdcp_say "clang-format"
  find csrc \( -name '*.cc' -o -name '*.h' \) -print0 | xargs -0 -r "$PY" "$MDCP_VENV/bin/clang-format" --dry-run --Werror
  mdcp_say "shellcheck"
  git ls-files '*.sh' '*.sbatch' .ci/run | xargs -r "$MDCP_VENV/bin/shellcheck" -x
fi
mdcp_say "pytest"
exec "$PY" -m pytest "${nightly[@]}" --durations=15 "$@"
