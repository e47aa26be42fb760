#!/usr/bin/env bash
# Installs what tests start, where that can be done: Debian or Ubuntu, as root. `slurm` for tests/slurm.py, `chromium`
# for tests/chromium.py. Elsewhere, and where it fails, it says so and ends with 0: the tests that need it are skipped
# then (under CI they fail).
set -euo pipefail

readonly what=$1
case $what in
    # slurmd's pmix plugin opens libpmix.so by that name, which only the -dev package has.
    slurm) packages=(slurm-wlm munge libpmix-dev) ;;
    chromium) packages=(chromium) ;;
esac

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
    echo "tests: without root no $what is installed (${packages[*]}); its tests are skipped where it is missing"
    exit 0
fi
mkdir -p build
readonly log=build/$what.log
echo "tests: installing ${packages[*]} (the output goes to $log)"
{ install || { apt-get -q update && install; }; } >"$log" 2>&1 </dev/null ||
    echo "tests: $what could not be installed: $(grep -m 1 '^E:' "$log" || tail -n 1 "$log")"
