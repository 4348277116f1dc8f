#!/usr/bin/env bash
# The whole end-to-end benchmark on an idle machine with two cores, and its results page: the native
# trainer on every data set and link and on virtual ranks, then each real trainer on the standard
# library (45 minutes). Prints the page on stdout, progress on stderr.
#
#   bash benchmarks/end_to_end/all.sh > benchmarks/results/end_to_end_cpu_202611.md
#   PYTHON=/path/to/python OUT=runs bash benchmarks/end_to_end/all.sh --quick    a small version
#
# Options are passed on to every `mdcp bench end-to-end`. A trainer that fails is named on stderr and
# has no table; the others go on.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3} OUT=${OUT:-runs}
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
begin=$SECONDS folders=()

bench() { # FOLDER OPTIONS...
  local folder=$1
  shift
  if "$PYTHON" -m megatron_dcp bench end-to-end --out "$folder" "$@" >&2; then
    folders+=("$folder")
  else
    printf 'all.sh: %s failed; no table of it\n' "$folder" >&2
  fi
}

bench "$OUT/end_to_end" "$@"
for trainer in torch deepspeed hf megatron; do
  bench "$OUT/bench_$trainer" --trainer "$trainer" --sets stdlib "$@"
done
cat <<PAGE
# End-to-end, two CPU cores

    bash benchmarks/end_to_end/all.sh $* > benchmarks/results/end_to_end_cpu_202611.md

$((SECONDS - begin)) s for everything. Columns and strategies: [performance](../../docs/performance.md).
Two ranks are two processes, one thread and one core each; their times are measured. Virtual ranks:
compute measured placement by placement on one core, links modelled. Repeats are interleaved; ratios are
taken inside a repeat, on the same samples; spreads are standard deviations over the repeats.

PAGE
"$PYTHON" benchmarks/end_to_end/record.py "${folders[@]}"
