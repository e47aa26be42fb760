#!/usr/bin/env bash
# The Weizmann rows of docs/results.md: jobs/weizmann.sh VIDEOS [RANKS] [OUT] [WEIGHTS]
# VIDEOS holds a folder for each of the ten actions, the files named PERSON_ACTION.avi. Index, split by person into three
# folds, pre-train on the embedded set, train every network on every fold, report. Started again, it goes on. WEIGHTS is a
# file of MobileNetV2 1.0 trained on ImageNet, under torchvision's names; without it MobileNetV2 is left out.
set -euo pipefail
videos=$(realpath "${1:?the folder of the Weizmann videos is wanted}")
imagenet=${4:-}
[[ -z $imagenet ]] || imagenet=$(realpath -e "$imagenet")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly ranks=${2:-2} out=${3:-weizmann}
networks=(tsn tsm tsm_pretrained)
[[ -n $imagenet ]] && networks+=(mobilenet_tsn mobilenet_tsm)
PATH=${VENV:-$PWD/.venv}/bin:$PATH
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [[ $(id -u) == 0 ]]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
launch=(mpirun -np "$ranks")
if [[ $(mpirun --version 2>&1) == *"Open MPI"* ]]; then
    launch+=(--oversubscribe --bind-to none --mca mpi_yield_when_idle 1)
fi

mkdir -p "$out"
[[ -f $out/all.csv ]] || summit-train data index "$videos" --out "$out/all.csv"
by_person=(--folds 3 --group '^[^_]+')
[[ -d $out/actions ]] || summit-train data split "$out/all.csv" "$out/actions" "${by_person[@]}"
[[ -d $out/direction ]] ||
    summit-train data split "$out/all.csv" "$out/direction" "${by_person[@]}" --only walk run skip jump --both-directions
[[ -f $out/motion/val.csv ]] || summit-train data motion "$out/motion" --train 320 --val 120

# train SPEC RUN key=value ...
train() {
    [[ -f $out/runs/$2/report.html ]] && return
    "${launch[@]}" summit-train train "configs/$1.yaml" "name=$2" "run_dir=$out/runs" "${@:3}"
}

train motion/tsm pretrained "data.train=$out/motion/train.csv" "data.val=$out/motion/val.csv"
for fold in 1 2 3; do
    for task in actions direction; do
        data=("data.root=$videos" "data.train=$out/$task/fold$fold/train.csv" "data.val=$out/$task/fold$fold/val.csv")
        for network in "${networks[@]}"; do
            weights=()
            [[ $network == tsm_pretrained ]] && weights=("model.pretrained=$out/runs/pretrained")
            [[ $network == mobilenet_* ]] && weights=("model.pretrained=$imagenet")
            train "weizmann/${task}_$network" "${task}_${network}_fold$fold" "${data[@]}" "${weights[@]}"
        done
    done
done
summit-train report "$out"/runs/*_fold?/ --out "$out/report.html"
for task in actions direction; do
    for network in "${networks[@]}"; do
        cat "$out/runs/${task}_${network}_fold"?/eval.json |
            awk -v name="$task $network" -F'[:,]' '/"top1_mean"/ { sum += $2; n++; all = all sprintf("  %.1f", $2) }
                END { printf "%-26s top-1 %.1f %%, mean of the folds%s\n", name, sum / n, all }'
    done
done
