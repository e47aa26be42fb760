#!/usr/bin/env bash
# Installs what tests compare with, for the Python given: timm, whose LAMB and LARS the solvers equal, and transformers,
# whose video networks are trained as foreign ones. timm alone: it wants torchvision, which could bring another torch,
# and the two modules that the tests load need torch only. Where it fails it says so and ends with 0: the tests that
# need it are skipped then (those of timm fail under CI).
set -euo pipefail

install() { # NAME OPTION...
    "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" && return
    mkdir -p build
    local log=build/$1.log
    echo "tests: installing $1 (the output goes to $log)"
    "$python" -m pip --disable-pip-version-check --no-input install "${@:2}" -c jobs/constraints.txt "$1" \
        >"$log" 2>&1 </dev/null || echo "tests: $1 could not be installed: $(tail -n 1 "$log")"
}

readonly python=$1
install timm --no-deps
install transformers
