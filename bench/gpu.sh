#!/usr/bin/env bash
# Prove that the product is right on one NVIDIA GPU, and measure how fast it is there, in less than nine minutes:
#
#     bench/gpu.sh OUT                      all parts; table, gpu.json, gpu.md and figures in OUT
#     bench/gpu.sh OUT --only speed feed    some of them
#     bench/gpu.sh OUT --dry-run            print each part's command
#     bench/gpu.sh OUT --rehearse           on the CPU with tiny networks: does the code run?
#     bench/gpu.sh OUT --wheels FOLDER      packages that this Python lacks, as wheels
#
# It needs no network, no root, no Horovod and no MPI. It uses python3, or PYTHON, which must have torch 2.7 to 2.13.
# What that Python lacks of the packages below is named; fetch it where there is a network, for the Python and the
# platform of the GPU's machine, here 3.12 on x86-64:
#
#     pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp -d wheels \
#         --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
#         -c jobs/constraints.txt \
#         av numpy pillow pyyaml jinja2 markupsafe \
#         pydantic pydantic-core annotated-types typing-extensions typing-inspection \
#         matplotlib contourpy cycler fonttools kiwisolver pyparsing python-dateutil six \
#         tensorboard tensorboard-data-server absl-py grpcio markdown protobuf werkzeug setuptools \
#         rich markdown-it-py mdurl pygments \
#         pytest pluggy iniconfig packaging hypothesis sortedcontainers attrs
#
# Name only what is missing, with what it needs: a line is a package and its dependencies. --no-deps leaves torch's own
# as they are. Exit status: 0 every check passes, 1 one fails, 2 something is missing.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

main() {
    local python=${PYTHON:-python3} words=()
    command -v "$python" >/dev/null ||
        refuse "there is no $python; name a Python that has torch: PYTHON=... bench/gpu.sh OUT"
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
    while (($#)); do
        case $1 in
            -h | --help) sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" ;;&
            --wheels)
                (($# > 1)) || refuse "--wheels needs a folder"
                add_wheels "$python" "$2"
                shift
                ;;
            *) words+=("$1") ;;
        esac
        shift
    done
    exec "$python" "$ROOT/bench/gpu/run.py" "${words[@]}"
}

# Unpack the wheels into a folder of their own: the Python itself is left as it is.
add_wheels() {
    local site
    compgen -G "$2/*.whl" >/dev/null || refuse "there are no wheels in $2"
    site=$(mktemp -d)
    "$1" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$2"/*.whl
    export PYTHONPATH="$PYTHONPATH:$site"
}

refuse() {
    echo "bench/gpu.sh: $1" >&2
    exit 2
}

main "$@"
