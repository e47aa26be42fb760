#!/usr/bin/env bash
# Puts flux-python into build/flux, for the Python given: Flux's own parsers of directives and options, which
# tests/cluster/test_flux_words.py asks. Alone: its libraries are on no package index, so it is no Flux. Where it cannot
# be had, it says so and ends with 0: the tests that need it are skipped then.
set -euo pipefail

[[ -d build/flux/flux ]] && exit 0
mkdir -p build
readonly log=build/flux.log
"$1" -m pip --disable-pip-version-check --no-input install --no-deps --target build/flux flux-python==0.88.0 ply==3.11 \
    >"$log" 2>&1 </dev/null || echo "tests: flux-python could not be installed: $(tail -n 1 "$log")"
