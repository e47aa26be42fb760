#!/usr/bin/env bash
# Installs the Slurm that tests/slurm.py starts, where that can be done: Debian or Ubuntu, as root. Elsewhere, and where
# it fails, it says so and ends with 0: the tests that need it are skipped then (under CI they fail).
set -euo pipefail

# slurmd's pmix plugin opens libpmix.so by that name, which only the -dev package has.
readonly packages=(slurm-wlm munge libpmix-dev)

installed() {
    [[ $(dpkg-query -W -f='${db:Status-Status}\n' "${packages[@]}" 2>/dev/null | grep -cx installed) == "${#packages[@]}" ]]
}

install() {
    DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Acquire::Retries=2 -o Acquire::http::Timeout=30 \
        -o DPkg::Lock::Timeout=120 install --no-install-recommends "${packages[@]}"
}

command -v apt-get >/dev/null && command -v dpkg-query >/dev/null || exit 0
installed && exit 0
if ((EUID != 0)); then
    echo "tests: without root no Slurm is installed (${packages[*]}); its tests are skipped where it is missing"
    exit 0
fi
mkdir -p build
readonly log=build/slurm.log
echo "tests: installing ${packages[*]} (the output goes to $log)"
{ install || { apt-get -q update && install; }; } >"$log" 2>&1 </dev/null ||
    echo "tests: Slurm could not be installed: $(grep -m 1 '^E:' "$log" || tail -n 1 "$log")"
