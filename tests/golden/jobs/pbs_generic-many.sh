#!/bin/bash -l
#PBS -N O_Neil_sons
# whole nodes, one chunk each
#PBS -l select=16:ncpus=32:ngpus=4
#PBS -l place=scatter:excl
#PBS -l walltime=0:33:00
# PBS may rerun the job after a node failure
#PBS -r y
# PBS's own output, in the folder that qsub is called in; the run's output goes to its own directory
#PBS -j oe

# 16 nodes x 4 ranks on pbs_generic. Written by summit-train: another submission writes it anew.
set -euo pipefail

say() { printf '[%(%F %T)T] %s\n' -1 "$*"; }

job_id=${PBS_JOBID:?this is a job script, for qsub}
run='/proj/runs/O'"'"'Neil & sons'
exec >>"$run/job/$job_id.out" 2>&1 # at once, where PBS may hand its own file over only at the end; a rerun adds to it
cd -- '/proj/our videos' # relative paths in the spec start here
python=/proj/venv/bin/python

if [[ -e $run/job/done ]]; then
    say "job $job_id: $run is done already, there is nothing to do"
    exit 0
fi

export PATH="$PATH:${python%/*}" # after the machine's own mpiexec
export OMP_NUM_THREADS=1 # the GPU computes and the workers decode; more threads would fight for their cores
export NCCL_DEBUG=WARN # an error of NCCL says where it happened
export SUMMIT_TRAIN_COMM=torch # comm: torch in the site profile
SUMMIT_TRAIN_SECRET=${SUMMIT_TRAIN_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
export SUMMIT_TRAIN_SECRET # ranks prove to each other that they know it; nobody else can join them

# The number of updates in the newest checkpoint, 0 where there is none.
newest_step() {
    local file step=0
    for file in "$run"/checkpoints/step_????????.pt; do
        [[ -e $file ]] && step=${file##*/step_}
    done
    echo $((10#${step%.pt}))
}

# The bytes of the scores that a stopped evaluation keeps.
scored_bytes() { { cat -- "$run"/predictions/*.partial 2>/dev/null || true; } | wc -c; }

job_nodes() { cat -- "$PBS_NODEFILE"; }
master=${MASTER_ADDR:-}
began=$(date +%s)
hosts=$run/job/hosts # the nodes in use
nodes=()
# Ask a node to do what a rank needs: start the program, read the spec and write the temporary folder.
ask() {
    local limit=$((restarts > 0 ? 30 : 120)) words code=0 # the first start may read all files from a slow file system
    words=$(timeout -s KILL "$limit" mpiexec -hosts "$1" -n 1 "$python" -m summit_train doctor --answer "$run/job/spec.yaml" 2>&1) || code=$?
    if ((code == 0)); then
        echo "$1" >>"$hosts.left"
        return
    fi
    words=$(awk '!NF { next } !/^srun: / { program = $0 } /^srun: (error|fatal)/ && !launcher { launcher = $0 } END { print program ? program : launcher }' <<<"$words")
    ((code != 137)) || words="no answer within $limit s"
    echo "$1 cannot start ranks: ${words:-exit status $code}" >>"$hosts.wrong"
}

ask_all() {
    local node running=0
    while read -r node; do
        ((running++ < 128)) || wait -n || true
        ask "$node" &
    done <"$hosts.all"
    wait
}

# Print the hosts that job/bad_nodes names: in the first word of a line, with commas between them, before a colon.
bad_nodes() {
    LC_ALL=C awk 'NR == 1 { sub(/^\357\273\277/, "") } { sub(/\r$/, "") } NF && $1 !~ /^#/ {
        count = split($1, names, /[,;]/)
        for (i = 1; i <= count; i++) if (names[i] != "") print split(names[i], parts, ":") == 2 ? parts[1] : names[i]
    }' "$run/job/bad_nodes" 2>/dev/null || true
}

# Set `nodes` to those to use, in the job's order: without those that job/bad_nodes names or PBS calls down,
# and without those that cannot start ranks now.
find_nodes() {
    local missing line
    # A rank that fails leaves its reason there: a name for each start, as ranks of an earlier one may still end.
    rm -f -- "$run"/job/failure.*
    export SUMMIT_TRAIN_FAILURE=$run/job/failure.$began.$restarts
    while read -r line; do
        say "job $job_id: job/bad_nodes: '$line' must be a node's name; write a line for each node"
    done < <(bad_nodes | grep -vxE '[A-Za-z0-9][A-Za-z0-9_.:-]*' | head -n 8)
    {
        bad_nodes
        pbsnodes -l 2>/dev/null || true
    } | awk '
        function short(host) { # without its domain; an IPv4 address has none
            if (host ~ /[^0-9.]/) sub(/\..*/, "", host)
            return host
        }
        bad { gone[short($1)]; next }
        !(short($1) in gone) && !seen[short($1)]++' bad=1 - bad=0 <(job_nodes) >"$hosts.all"
    : >"$hosts.left"
    : >"$hosts.wrong"
    attend ask_all
    while read -r line; do say "job $job_id: $line"; done < <(head -n 8 -- "$hosts.wrong")
    missing=$(printf '%s\n' "${nodes[@]}" | grep -vxFf "$hosts.left" | paste -sd, || true)
    why+=${missing:+, without $missing}
    mapfile -t nodes < <(grep -xFf "$hosts.left" -- "$hosts.all" | head -n 16)
    printf '%s\n' "${nodes[@]}" >"$hosts"
    # For the ranks: the nodes that the next start could replace, and lose.
    left=$((restarts < 5 ? $(wc -l <"$hosts.left") : 0))
    echo "$((left > ${#nodes[@]} ? left - ${#nodes[@]} : 0)) $((left > 16 ? left - 16 : 0))" >"$run/job/spares"
}

# The launcher's words for these nodes.
place_ranks() {
    # Rank 0 is on the first one. Not by another PBS_NODEFILE: Open MPI looks for PBS's own files beside it.
    export MASTER_ADDR="${master:-${nodes[0]}}"

    all_ranks=(
        mpiexec # of MPICH or Intel MPI
        -f "$hosts"
        -n $((${#nodes[@]} * 4))
        -ppn 4
        -bind-to core:8 # a rank and its loader workers share these cores
    )
}


stop='' # the signal that asked this job to stop
signals=0
ranks='' # the launcher's process while it runs

# The ranks write a checkpoint and leave with 85, whatever signal came: SIGTERM would make launchers kill them.
hand_over() {
    kill -TERM "$ranks" || true # Hydra passes it on and waits for the ranks; SIGUSR2 ends it; it may just have ended
}

on_signal() {
    stop=$1
    signals=$((signals + 1))
    say "job $job_id: SIG$stop, the ranks are asked for a checkpoint"
    [[ -z $ranks ]] || hand_over
}
trap 'on_signal USR2' USR2 # the walltime is near
trap 'on_signal TERM' TERM # somebody cancels, or the scheduler wants the nodes for others
trap 'on_signal INT' INT
# PBS sends no warning: at the walltime it sends SIGTERM and, seconds later, SIGKILL. So the script warns itself.
warn_later() {
    local nap
    sleep $((1680 > SECONDS ? 1680 - SECONDS : 1)) &
    nap=$!
    trap 'kill "$nap"' TERM
    wait "$nap" && kill -USR2 "$$"
}
warn_later &
timer=$!
trap 'kill "$timer" 2>/dev/null || true' EXIT # a process that stays behind would keep the job alive

# A launcher may wait for a node that is silent until the scheduler gives that up, minutes after the ranks have failed.
end_later() {
    local nap
    exec {nap}<> <(:) # a sleep of its own would outlive this
    until [[ -e $SUMMIT_TRAIN_FAILURE ]]; do read -rt 5 -u "$nap" || true; done
    read -rt 20 -u "$nap" || true
    say "job $job_id: the ranks have failed, but the launcher still waits: ending it"
    kill -KILL "$1"
}

# Run a command to its end; its exit status is in $status. A signal interrupts the waiting only.
attend() {
    local seen ender
    "$@" &
    ranks=$!
    end_later "$ranks" &
    ender=$!
    while
        seen=$signals
        status=0
        wait "$ranks" || status=$?
        ((signals != seen))
    do :; done
    ranks=''
    kill "$ender" 2>/dev/null || true
}

first=$(newest_step)
scored=$(scored_bytes)
status=0
restarts=0
failed_at=''   # what there was when the ranks failed last: steps, scores, bad nodes
interrupted='' # where a signal came while no ranks could hear it
lost=''        # where too few nodes are left
why=''
while :; do
    find_nodes
    if [[ -n $stop ]]; then
        interrupted=yes
        break
    fi
    if ((${#nodes[@]} < 16)); then
        excluded=$(bad_nodes | paste -sd,)
        say "job $job_id: nodes left: ${#nodes[@]} (${nodes[*]}), needed: 16; set spare_nodes or min_nodes in the site profile${excluded:+; $run/job/bad_nodes leaves out $excluded}"
        ((restarts > 0)) || exit 1
        # This script's own node is not lost: a launcher that refuses all of them would refuse the next job, too.
        [[ -s $hosts.left || ! -s $hosts.wrong ]] || grep -qvE ": srun: (error|fatal)" "$hosts.wrong" || exit 1
        lost=yes
        break
    fi
    place_ranks
    step=$(newest_step)
    rm -f -- "$run/stopped"
    where="on ${#nodes[@]} node${nodes[1]:+s}, $((${#nodes[@]} * 4)) ranks"
    say "job $job_id: $run from step $step $where"
    ((restarts == 0)) || printf '%(%FT%T%z)T %s\n' -1 "job $job_id: $why; from step $step $where: ${nodes[*]}" >>"$run/job/restarts"
    status=0
    if [[ -n $stop ]]; then
        interrupted=yes
        break
    fi
    ((status != 0)) || attend "${all_ranks[@]}" "$python" -m summit_train train "$run/job/spec.yaml"
    [[ ! -e $run/job/done ]] || status=0 # rank 0 writes it when the result is complete; a later signal does not make the job fail

    # Once more in this job, unless the user is to blame, or nothing was gained since the ranks failed before.
    ((status != 0 && status != 2)) && [[ ! -e $run/stopped ]] || break
    if [[ -n $stop ]]; then
        [[ $stop != USR2 ]] || interrupted=yes # it came too early, or too late
        break
    fi
    why="exit status $status"
    if [[ -s $SUMMIT_TRAIN_FAILURE ]]; then # the words of a rank: the launcher may have been killed here
        why=$(awk 'NR == 1 { sub(/^summit-train[:,] /, ""); words = $0 } END { print "\"" words (NR > 1 ? " " $0 : "") "\"" }' "$SUMMIT_TRAIN_FAILURE")
        status=1
    fi
    step=$(newest_step)
    gained="$step $(scored_bytes) $(wc -l 2>/dev/null <"$run/job/bad_nodes" || true)"
    ((restarts < 5)) && [[ $gained != "$failed_at" ]] || break
    failed_at=$gained
    restarts=$((restarts + 1))
    say "job $job_id: the ranks ended with $why at step $step; restart $restarts of 5"
done

# Rank 0 leaves this file after the checkpoint. The ranks leave with 85, too; but whether a launcher passes that on, or
# answers with the signal by which it ended those that were slower, is known of srun and mpirun and not of jsrun.
if [[ ! -e $run/stopped && -z $interrupted$lost ]]; then
    if ((status == 0)); then
        trap '' USR2 TERM INT
        : >"$run/job/done"
        say "job $job_id: done, $run"
        exit 0
    fi
    say "job $job_id: failed with exit status $status${stop:+ after SIG$stop}; not started again"
    exit $((status == 85 ? 1 : status)) # 85 would be a wish to be requeued
fi
last=$(newest_step)
record=requeues # the file in RUN/job with a line for each
if [[ ($stop == TERM || $stop == INT) && $record == requeues ]]; then
    say "job $job_id: stopped by SIG$stop at step $last; submit it again to continue, unless it was preempted and the scheduler starts it again"
    exit 143
fi
# If eval.json exists, only the report is missing.
if [[ -z $lost && $record == requeues && ! -e $run/eval.json ]] && ((last <= first)) && [[ $(scored_bytes) == "$scored" ]]; then
    say "job $job_id: stopped at step $last without a new step or score since its start; not started again"
    exit 1
fi
final=$(cat "$run/job/last_job" 2>/dev/null || true) # of a chain of jobs
if [[ -n $final && $final != "$job_id" ]]; then
    say "job $job_id: stopped at step $last; the next job of the chain goes on"
    exit 0
fi
touch "$run/job/$record"
requeues=$(wc -l <"$run/job/$record")
most=20
[[ $record == requeues ]] || most=$((10 * most)) # preemptions are not the job's fault
if ((requeues >= most)); then
    say "job $job_id: stopped at step $last after $requeues $record, no more are allowed; submit it again to continue"
    exit 1
fi
# qrerun is for operators and no exit status requeues, so a new job continues when this one has ended.
cd -- "$PBS_O_WORKDIR"
resubmit() { env -u MASTER_ADDR -u SUMMIT_TRAIN_SECRET qsub -W "depend=afterany:$PBS_JOBID" job.sh; } # with -V it would inherit them
if ! next=$(resubmit); then
    say "job $job_id: stopped at step $last; the scheduler refused a new job; submit it again to continue"
    exit 1
fi
echo "$job_id step $last" >>"$run/job/requeues"
# Its id is a new one: the sweep's status and the next submission look for it there.
line=$(grep -F "\"id\": \"$job_id\"" "$run/job/submitted.jsonl" 2>/dev/null | tail -n 1 || true)
[[ -z $line ]] || printf '%s\n' "${line/"$job_id"/$next}" >>"$run/job/submitted.jsonl"
[[ -z $final ]] || echo "$next" >"$run/job/last_job"
say "job $job_id: stopped at step $last; job $next continues, $((requeues + 1)) of 20"
exit 85
