#!/usr/bin/env bash
# Installs what tests start or compare with: tests/install.sh PYTHON WHAT...
#
#   slurm         for tests/slurm.py
#   pbs           Slurm's wrappers qsub and generate_pbs_nodefile, for tests/cluster/test_slurm.py. Unpacked into
#                 build/slurm_torque: installed, their package would become this machine's mpirun
#   chromium      for tests/chromium.py
#   timm          whose LAMB and LARS the solvers equal. Alone: it wants torchvision, which could bring another torch,
#                 and the modules that the tests load need torch only
#   transformers  whose video networks are trained as foreign ones
#   flux          Flux's own parsers of directives and options, into build/flux, for tests/cluster/test_flux_words.py.
#                 Alone: its libraries are on no package index, so it is no Flux
#
# The first three need Debian or Ubuntu, and root. Nothing is asked for that is there in the version wanted. What cannot
# be had is named, and asked for again after a day, after a change here or of the pins, and under CI: the exit status is
# 0, and the tests that need it are skipped (under CI most of them fail).
set -euo pipefail

readonly python=$1 pins=jobs/constraints.txt flux=0.88.0 ply=3.11
shift

packages() { # WHAT: Debian's, a line each
    case $1 in
        # slurmd's pmix plugin opens libpmix.so by that name, which only the -dev package has.
        slurm) printf '%s\n' slurm-wlm munge libpmix-dev ;;
        pbs) printf '%s\n' libslurm-perl libswitch-perl ;;
        chromium) echo chromium ;;
    esac
}

installed() { # PACKAGE...
    [[ $(dpkg-query -W -f='${db:Status-Status}\n' "$@" 2>/dev/null | grep -cx installed) == "$#" ]]
}

is_there() { # WHAT
    case $1 in
        slurm | chromium) installed "${packages[@]}" ;;
        pbs) [[ -d build/slurm_torque/usr ]] ;;
        flux) [[ -d build/flux/flux_python-$flux.dist-info && -d build/flux/ply-$ply.dist-info ]] ;;
        *)
            "$python" -c 'import sys; from importlib.metadata import version; sys.exit(version(sys.argv[1]) != sys.argv[2])' \
                "$1" "$(sed -n "s/^$1==//p" "$pins")" 2>/dev/null
            ;;
    esac
}

install_now() { # PACKAGE...
    DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Acquire::Retries=2 -o Acquire::http::Timeout=30 \
        -o DPkg::Lock::Timeout=120 install --no-install-recommends "$@"
}

apt() { # PACKAGE...
    install_now "$@" || { apt-get -q update && install_now "$@"; }
}

pip() { # OPTION... PACKAGE...
    "$python" -m pip --disable-pip-version-check --no-input install "$@"
}

get() { # WHAT
    case $1 in
        slurm | chromium) apt "${packages[@]}" ;;
        pbs)
            apt "${packages[@]}" && rm -rf build/slurm_torque && mkdir -p build/slurm_torque &&
                (cd build/slurm_torque && apt-get -q download slurm-wlm-torque && dpkg -x slurm-wlm-torque_*.deb .)
            ;;
        flux) pip --no-deps --target build/flux --upgrade "flux-python==$flux" "ply==$ply" ;;
        timm) pip --no-deps -c "$pins" timm ;;
        *) pip -c "$pins" "$1" ;;
    esac
}

for what; do
    mapfile -t packages < <(packages "$what")
    if ((${#packages[@]})); then
        { command -v apt-get && command -v dpkg-query; } >/dev/null || continue
    fi
    ! is_there "$what" || continue
    if ((${#packages[@]} && EUID != 0)); then
        echo "tests: $what needs root to install (${packages[*]}); tests that need it are skipped where it is missing"
        continue
    fi
    mkdir -p build
    log=build/$what.log failed=build/$what.failed
    wanted=$(cat "${BASH_SOURCE[0]}" "$pins" | cksum)
    lately=$(find build -maxdepth 1 -name "$what.failed" -mmin -1440 -exec cat {} +)
    if [[ -n ${CI:-} || $lately != "$wanted" ]]; then
        rm -f "$failed"
        echo "tests: installing $what (the output goes to $log)"
        get "$what" >"$log" 2>&1 </dev/null || echo "$wanted" >"$failed"
    fi
    if [[ -f $failed ]]; then
        echo "tests: $what could not be installed: $(grep -m 1 '^E:' "$log" || tail -n 1 "$log")"
    fi
done
