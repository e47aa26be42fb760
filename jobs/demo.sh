#!/usr/bin/env bash
# Trains TSM and its 2D twin on the embedded motion set, on RANKS ranks: jobs/demo.sh [RANKS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly ranks=${1:-2}
readonly venv=${VENV:-$PWD/.venv}
PATH=$venv/bin:$PATH
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [[ ! -f demo/val.csv ]]; then
    summit-train data motion demo --train 320 --val 120
fi
for network in tsm tsn; do
    printf '\n== %s on %s ranks\n' "$network" "$ranks"
    summit-train train "configs/motion/$network.yaml" --ranks "$ranks"
done
summit-train report demo/runs/motion_tsm demo/runs/motion_tsn --out demo/report.html

printf '\n== Top-1 on the validation videos (chance: 25 %%)\n'
for network in tsm tsn; do
    accuracy=$(sed -nE 's/.*"top1_mean": *([0-9.]+).*/\1/p' "demo/runs/motion_$network/eval.json")
    printf '%s  %6.2f %%\n' "$network" "$accuracy"
done
echo "The report: demo/report.html"
