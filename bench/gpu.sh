#!/usr/bin/env bash
# Check and measure one NVIDIA GPU in less than nine minutes:
#
#     bench/gpu.sh OUT                 python3, or PYTHON=...; OUT gets gpu.md, gpu.json, pictures and the log
#     REHEARSE=1 bench/gpu.sh OUT      the same code on the CPU with tiny networks: its figures mean nothing
#
# It needs a Python with torch 2.7 or newer and the packages that docs/results.md lists; no network, no root, no Horovod,
# no MPI. Exit status: 0 every test passes, 1 one fails, is skipped or has no time, 2 something is missing. Without a
# GPU it says so and exits 0.
set -euo pipefail

if (($# != 1)) || [[ $1 == -* ]]; then
    sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
out=$(realpath -m "$1") python=${PYTHON:-python3} rehearse=${REHEARSE:-}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

cuda=$("$python" -c 'import torch; print(torch.cuda.is_available())' 2>/dev/null) || {
    echo "bench/gpu.sh: $python cannot import torch; name a Python that can: PYTHON=... bench/gpu.sh OUT" >&2
    exit 2
}
if [[ -z $rehearse && $cuda != True ]]; then
    echo "skipped: torch sees no NVIDIA GPU; REHEARSE=1 runs the same code on the CPU"
    exit 0
fi
missing=$("$python" -c 'import importlib.util as found
names = "PIL av hypothesis jinja2 matplotlib numpy pydantic pytest rich tensorboard xdist yaml".split()
print(*(name for name in names if found.find_spec(name) is None))')
if [[ -n $missing ]]; then
    echo "bench/gpu.sh: $python lacks $missing; see docs/results.md for how to bring wheels" >&2
    exit 2
fi

mkdir -p "$out"
status=0 choice=(-m gpu)
if [[ -n $rehearse ]]; then
    choice=(-k rehearsal)
    export CUDA_VISIBLE_DEVICES=
fi
mapfile -t files < <(printf '%s\n' tests/gpu/test_*.py && grep -rl 'mark\.gpu' tests --include='test_*.py')
# SIGINT lets pytest write down what it has found so far. --strict-config would ask for pytest-timeout.
timeout --signal=INT --kill-after=15 270 "$python" -m pytest "${choice[@]}" -q -rs -p no:cacheprovider \
    -o addopts='--import-mode=importlib --strict-markers' "${files[@]}" >"$out/tests.log" 2>&1 || status=1
tests=$(grep -E ' in [0-9.]+s' "$out/tests.log" | tail -n 1) || true
[[ $tests == *passed* && $tests != *skipped* ]] || status=1
((status == 0)) || tests="FAILED, see $out/tests.log: $tests"
"$python" bench/gpu.py "$out" --seconds 230 ${rehearse:+--small} || status=$?
echo "tests: $tests" | tee -a "$out/gpu.md"
exit "$status"
