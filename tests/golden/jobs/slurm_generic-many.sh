#!/bin/bash
#SBATCH --job-name=O_Neil_sons
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --time=0:33:00
# to this script alone, 300 s before the walltime: it hands the signal to the ranks
#SBATCH --signal=B:USR2@300
# it may be put back into the queue, and then adds to its output
#SBATCH --requeue
#SBATCH --open-mode=append
# in the folder that sbatch is called in
#SBATCH --output=%j.out
# ranks and loader workers use all cores of a node
#SBATCH --exclusive
# all of the node's memory, which --exclusive alone does not give
#SBATCH --mem=0

# 16 nodes x 4 ranks on slurm_generic. Written by summit-train: another submission writes it anew.
set -euo pipefail

say() { printf '[%(%F %T)T] %s\n' -1 "$*"; }

job_id=${SLURM_JOB_ID:?this is a job script, for sbatch}
run='/proj/runs/O'"'"'Neil & sons'
cd -- '/proj/our videos' # relative paths in the spec start here
python=/proj/venv/bin/python

if [[ -e $run/job/done ]]; then
    say "job $job_id: $run is done already, there is nothing to do"
    exit 0
fi

export PATH="${python%/*}:$PATH" # the environment's own mpirun, where set-up installed one
export OMP_NUM_THREADS=1 # the GPU computes and the workers decode; more threads would fight for their cores
export NCCL_DEBUG=WARN # an error of NCCL says where it happened
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

job_nodes() { scontrol show hostnames "$SLURM_JOB_NODELIST"; }
began=$(date +%s)
hosts=$run/job/hosts # the nodes in use
nodes=()
# Ask a node to do what a rank needs: start the program, read the spec and write the temporary folder.
ask() {
    local limit=$((restarts > 0 ? 30 : 120)) words code=0 # the first start may read all files from a slow file system
    words=$(timeout -s KILL "$limit" srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$1" --mpi=none "$python" -m summit_train doctor --answer "$run/job/spec.yaml" 2>&1) || code=$?
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

# Set `nodes` to those to use, in the job's order: without those that job/bad_nodes names,
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
    ((restarts == 0)) || export SLURM_OVERLAP=1 # as --overlap: Slurm may not know yet that the last step has ended

    # Since Slurm 22.05 srun does not take this from sbatch.
    export SRUN_CPUS_PER_TASK=8
    on_nodes=(--nodelist="$hosts" --nodes="${#nodes[@]}" --kill-on-bad-exit=1) # one task that dies ends all of them
    all_ranks=(
        srun
        "${on_nodes[@]}"
        --ntasks=$((${#nodes[@]} * 4))
        --ntasks-per-node=4
        --cpu-bind=cores # each rank and its loader workers have 8 cores to themselves
        --mpi=pmix # how srun and MPI find each other; both have to be built with PMIx
    )
}


stop='' # the signal that asked this job to stop
signals=0
ranks='' # the launcher's process while it runs

# The ranks write a checkpoint and leave with 85, whatever signal came: SIGTERM would make launchers kill them.
hand_over() {
    kill -USR2 "$ranks" || true # the launcher passes it on; it may just have ended
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
job_record=$(scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null | grep "^JobId=$SLURM_JOB_ID " || true)
if [[ $job_record =~ " Restarts="([0-9]+) ]] && ((BASH_REMATCH[1] > ${SLURM_RESTART_COUNT:-0})); then
    say "job $job_id: stopped at step $last; Slurm has requeued it, and starts it again"
    exit 143
elif [[ $job_record =~ " PreemptTime="[0-9] ]]; then
    record=preemptions # within the grace time: this script requeues the job
fi
if [[ ($stop == TERM || $stop == INT) && $record == requeues ]]; then
    say "job $job_id: stopped by SIG$stop at step $last; submit it again to continue"
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
# A job that was cancelled meanwhile stays cancelled.
state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) || state=RUNNING # no answer is no reason to give up
if [[ $state != RUNNING ]]; then
    say "job $job_id: stopped at step $last; Slurm calls it ${state:-gone}, so it is not requeued here"
    exit 1
fi
echo "$job_id step $last" >>"$run/job/$record"
say "job $job_id: stopped at step $last; requeued, $((requeues + 1)) of $most $record"
if ! scontrol requeue "$SLURM_JOB_ID"; then
    say "job $job_id: Slurm did not take it back; submit it again to continue"
    exit 1
fi
exit 85
