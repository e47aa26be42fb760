#!/bin/bash
#BSUB -J O_Neil_sons
# output and errors, in the folder that bsub is called in; a requeued job adds to it
#BSUB -o %J.out
# whole nodes
#BSUB -nnodes 16
# hours and minutes
#BSUB -W 0:33
# 300 s before that, SIGUSR2: time for a checkpoint
#BSUB -wa USR2
#BSUB -wt 5
# this exit status puts the job back into the queue; -r does so after a node failed
#BSUB -Q 85
#BSUB -r
# the node's own disk at /mnt/bb, and one hardware thread a core; only one -alloc_flags line is read
#BSUB -alloc_flags "NVME smt1"

# 16 nodes x 6 ranks on summit. Written by summit-train: another submission writes it anew.
set -euo pipefail

say() { printf '[%(%F %T)T] %s\n' -1 "$*"; }

job_id=${LSB_JOBID:?this is a job script, for bsub}
run='/proj/runs/O'"'"'Neil & sons'
cd -- '/proj/our videos' # relative paths in the spec start here
python=/proj/venv/bin/python

if [[ -e $run/job/done ]]; then
    say "job $job_id: $run is done already, there is nothing to do"
    exit 0
fi

export PATH="${python%/*}:$PATH" # the environment's own mpirun, where set-up installed one
export OMP_NUM_THREADS=1 # six ranks and their loader workers share 42 cores
export PAMI_ENABLE_STRIPING=1 # messages go over both rails of the node's network
export PAMI_IBV_ADAPTER_AFFINITY=1 # each socket takes the network port beside it
export PAMI_IBV_DEVICE_NAME=mlx5_0:1,mlx5_3:1 # the two rails, as socket 0 orders them
export PAMI_IBV_DEVICE_NAME_1=mlx5_3:1,mlx5_0:1 # the two rails, as socket 1 orders them
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

# LSF signals every process of a job on this launch node. jsrun is kept out of it, jskill tells the ranks.
shielded_jsrun() {
    trap '' USR2
    exec jsrun "$@"
}
all_ranks=(
    shielded_jsrun
    -n 16 # resource sets: one a node, so that
    -r 1 # every rank sees all GPUs of its node and its local rank picks one
    -g 6 # GPUs of a set
    -a 6 # ranks of a set
    -c 42 # cores of a set
    -b packed:7 # cores of a rank and its loader workers
    --smpiargs=-gpu # MPI may be handed GPU memory
)

stop='' # the signal that asked this job to stop
signals=0
ranks='' # the launcher's process while it runs

# The ranks write a checkpoint and leave with 85, whatever signal came: SIGTERM would make launchers kill them.
hand_over() {
    jskill -s "$(kill -l USR2)" all || true # to all ranks; they may just have ended
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

# Run a command to its end; its exit status is in $status. A signal interrupts the waiting only.
attend() {
    local seen
    "$@" &
    ranks=$!
    while
        seen=$signals
        status=0
        wait "$ranks" || status=$?
        ((signals != seen))
    do :; done
    ranks=''
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
    step=$(newest_step)
    rm -f -- "$run/stopped"
    where="on 16 nodes, 96 ranks"
    say "job $job_id: $run from step $step $where"
    ((restarts == 0)) || printf '%(%FT%T%z)T %s\n' -1 "job $job_id: $why; from step $step $where" >>"$run/job/restarts"
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
echo "$job_id step $last" >>"$run/job/requeues"
say "job $job_id: stopped at step $last; LSF requeues it by its exit status 85, $((requeues + 1)) of 20"
exit 85
