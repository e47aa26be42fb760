#!/usr/bin/env bash
# Unpacks Slurm's wrappers qsub and generate_pbs_nodefile into build/slurm_torque, for tests/cluster/test_slurm.py.
# Installed, their package would become this machine's mpirun. Only as root on Debian or Ubuntu, as their Perl modules
# are installed; elsewhere, and where it fails, it ends with 0: the test is skipped then.
set -euo pipefail

[[ -d build/slurm_torque/usr ]] && exit 0
command -v apt-get >/dev/null && command -v dpkg >/dev/null && ((EUID == 0)) || exit 0
readonly log=build/slurm_torque.log
mkdir -p build/slurm_torque
{
    DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=120 install --no-install-recommends \
        libslurm-perl libswitch-perl &&
        (cd build/slurm_torque && apt-get -q download slurm-wlm-torque && dpkg -x slurm-wlm-torque_*.deb .)
} >"$log" 2>&1 </dev/null || echo "tests: Slurm's qsub could not be had: $(tail -n 1 "$log")"
