#!/usr/bin/env bash
# Installs timm, which solvers and augmentation are compared with, for the Python given. Alone: timm wants torchvision,
# which could bring another torch, and the modules that the tests load need torch and Pillow only. Where it fails it says
# so and ends with 0: the tests that need it are skipped then (under CI they fail).
set -euo pipefail

"$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("timm") is None)' && exit 0
mkdir -p build
readonly log=build/timm.log
echo "tests: installing timm (the output goes to $log)"
"$1" -m pip --disable-pip-version-check --no-input install --no-deps -c jobs/constraints.txt timm >"$log" 2>&1 </dev/null ||
    echo "tests: timm could not be installed: $(tail -n 1 "$log")"
