#!/usr/bin/env bash
# Trains TSM and its 2D twin on the embedded motion set and draws the report: jobs/demo.sh [RANKS] [OUT]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly ranks=${1:-2}
readonly out=${2:-demo}
readonly bin=${VENV:-$PWD/.venv}/bin
PATH=$bin:$PATH # the environment's own mpirun, where set-up installed one
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [[ $(id -u) == 0 ]]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

launch=(mpirun -np "$ranks")
if [[ $(mpirun --version 2>&1) == *"Open MPI"* ]]; then
    launch+=(--oversubscribe --bind-to none --mca mpi_yield_when_idle 1)
fi
settings=("data.train=$out/train.csv" "data.val=$out/val.csv" "run_dir=$out/runs")

[[ -t 1 ]] && export TTY_COMPATIBLE=1 # the ranks' output goes through mpirun to this terminal

if [[ ! -f $out/val.csv ]]; then
    summit-train data motion "$out" --train 320 --val 120
fi
for network in tsm tsn; do
    echo "== $network on $ranks ranks"
    "${launch[@]}" summit-train train "configs/motion/$network.yaml" "${settings[@]}"
done
echo "== chance is 25 %; top-1, mean over the last checkpoints:"
for run in "$out"/runs/*/; do
    printf '%-24s %s\n' "$(basename "$run")" "$(sed -n 's/.*"top1_mean": *\([0-9.]*\).*/\1 %/p' "$run/eval.json")"
done
summit-train report "$out"/runs/*/ --out "$out/report.html"
echo "The report: $out/report.html"
