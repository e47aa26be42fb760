#!/usr/bin/env bash
# Installs the wheel into an environment for each row, uses it there from generated videos to a report and an ONNX file,
# and prints a table of what was installed and whether it works.
#
#   tests/matrix.sh DIR PYTHON:PACKAGES...   tests/matrix.sh /tmp/matrix python3.10:lowest python3.13:newest
#
# PACKAGES: lowest (the lower bounds of setup.cfg), pinned (jobs/constraints.txt), newest. PYTHON: a program or a path.
# WHEEL=FILE tests that wheel; else one is built from the last commit. UV_CACHE_DIR, UV_FIND_LINKS and others are uv's.
# DIR/env, up to 6 GB, holds one row at a time; DIR/NUMBER.log has a row's output. Exit status: 0 if every row passed.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$1"
dir=$(cd "$1" && pwd)
shift
readonly repo dir
readonly columns=(torch av numpy pydantic pillow matplotlib rich jinja2 pyyaml tensorboard onnx onnxruntime onnxscript)
unset PYTHONPATH PYTHONHOME

if ! command -v uv >/dev/null; then
    python3 -m venv "$dir/uv"
    "$dir/uv/bin/pip" install -q uv
    PATH=$dir/uv/bin:$PATH
fi

build_wheel() { # from a clean copy: what an earlier build left would be picked up
    rm -rf "$dir/source" "$dir/wheel"
    mkdir "$dir/source"
    git -C "$repo" archive HEAD | tar x -C "$dir/source"
    uv build -q --wheel --out-dir "$dir/wheel" "$dir/source" >&2
    echo "$dir"/wheel/*.whl
}

requirements() { # EXTRA: those of the wheel, and of one of its extras
    "$dir/env/bin/python" - "$wheel" "extra == \"$1\"" <<'EOF'
import email, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    lines = email.message_from_bytes(wheel.read(metadata)).get_all("Requires-Dist")
for need, _, marker in (line.partition("; ") for line in lines):
    if marker in ("", sys.argv[2]):
        print(need)
EOF
}

install() { # PYTHON PACKAGES EXTRA
    local options=(--upgrade)
    [[ $2 != lowest ]] || options=(--resolution lowest-direct)
    [[ $2 != pinned ]] || options=(-c "$repo/jobs/constraints.txt")
    uv venv -q --clear -p "$1" "$dir/env" &&
        requirements "$3" >"$dir/requirements.txt" &&
        uv pip install -p "$dir/env/bin/python" --only-binary :all: "${options[@]}" -r "$dir/requirements.txt" "$wheel"
}

step() { # COMMAND...: one that fails is the row's result
    echo "+ $*"
    "$@" && return
    echo "$2" >"$dir/failed"
    return 1
}

smoke() { # in an empty folder
    cat >mine.yaml <<'EOF'
name: mine
model: {arch: tsm, backbone: resnet18, width: 0.25, num_classes: 4}
data: {train: demo/train.csv, val: demo/val.csv, frame_stride: 2, short_side: [64, 64], crop: 56, flip: false}
scale: {gpus: 4, clips_per_gpu: 8}
optimizer: {base_lr: 0.02, weight_decay: 5.0e-4}
schedule: {epochs: 15, warmup_epochs: 2}
evaluate: {clips: 1, short_side: 64}
EOF
    step summit-train data motion demo --train 160 --val 40 &&
        step summit-train plan mine.yaml --ranks 2 &&
        step summit-train train mine.yaml --ranks 2 &&
        step summit-train eval runs/mine --name again &&
        step summit-train predict runs/mine demo/val.csv >predicted &&
        step summit-train submit mine.yaml --site slurm_generic --nodes 1 --speed 10 --dry-run &&
        step summit-train simulate shipped:kinetics/tsm_r50_8f --machine summit --nodes 1 &&
        step summit-train report runs/mine &&
        if [[ -d $(echo "$dir"/env/lib/*/site-packages/onnx) ]]; then
            step summit-train export runs/mine --out mine.onnx
        fi
}

row() { # PYTHON PACKAGES: prints the row's cells
    local installed name top1 result=passed began=$SECONDS
    rm -rf "$dir/run" "$dir/failed"
    mkdir "$dir/run"
    if ! { install "$1" "$2" export || install "$1" "$2" none; } >&2; then
        echo "$1 | $2 | not installed"
        return 1
    fi
    installed=$(uv pip list -q -p "$dir/env/bin/python")
    began=$SECONDS
    (
        cd "$dir/run"
        export PATH=$dir/env/bin:$PATH XDG_CACHE_HOME=$dir/run/cache OMP_NUM_THREADS=1
        smoke
    ) >&2 || result="failed: $(cat "$dir/failed")"
    printf '%s | %s' "$("$dir/env/bin/python" -c 'import platform; print(platform.python_version())')" "$2"
    for name in "${columns[@]}"; do
        printf ' | %s' "$(awk -v name="$name" 'tolower($1) == name {print $2}' <<<"$installed")"
    done
    top1=$(sed -n 's/^top-1 \(.*\)  (.*/\1/p' "$dir/run/predicted" || true)
    printf ' | %s | %s | %s\n' "$top1" "$result" "$((SECONDS - began))"
    [[ $result == passed ]]
}

wheel=${WHEEL:-$(build_wheel)}
status=0 number=0
printf '| Python | packages |%s top-1 | result | seconds |\n' "$(printf ' %s |' "${columns[@]}")"
for words in "$@"; do
    number=$((number + 1))
    cells=$(row "${words%:*}" "${words##*:}" 2>"$dir/$number.log") || status=1
    echo "| $cells |"
done
rm -rf "$dir/env" "$dir/run"
exit "$status"
