#!/bin/bash
#SBATCH --job-name=tsm_r50_8f
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=10
#SBATCH --gpus-per-node=4
#SBATCH --time=2:00:00
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

# 1 node x 4 ranks on slurm_v100. Written by summit-train: another submission writes it anew.
set -euo pipefail

say() { printf '[%(%F %T)T] %s\n' -1 "$*"; }

job_id=${SLURM_JOB_ID:?this is a job script, for sbatch}
run=/proj/runs/tsm_r50_8f
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

forwarded=(-x PATH -x SUMMIT_TRAIN_SECRET -x OMP_NUM_THREADS -x NCCL_DEBUG) # to the ranks of other nodes
all_ranks=(
    mpirun
    -np 4
    --map-by ppr:4:node:PE=10 # a rank and its loader workers share these cores
    --bind-to core
    "${forwarded[@]}"
)

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
rm -f -- "$run/stopped"
say "job $job_id: $run from step $first on 1 node, 4 ranks"
# One crash of the ranks at their start is forgiven.
for attempt in 1 2; do
    began=$SECONDS
    attend "${all_ranks[@]}" "$python" -m summit_train train "$run/job/spec.yaml"
    ((attempt == 1 && status == 139 && SECONDS - began < 300)) && [[ -z $stop && $(newest_step) == "$first" ]] || break
    say "job $job_id: the ranks crashed at their start (exit status 139); started once more"
done

# Rank 0 leaves this file after the checkpoint. The ranks leave with 85, too; but whether a launcher passes that on, or
# answers with the signal by which it ended those that were slower, is known of srun and mpirun and not of jsrun.
if [[ ! -e $run/stopped ]]; then
    if ((status == 0)); then
        : >"$run/job/done"
        say "job $job_id: done, $run"
        exit 0
    fi
    say "job $job_id: failed with exit status $status${stop:+ after SIG$stop}; not started again"
    exit $((status == 85 ? 1 : status)) # 85 would be a wish to be requeued
fi
last=$(newest_step)
if [[ $stop == TERM || $stop == INT ]]; then
    say "job $job_id: stopped by SIG$stop at step $last; submit it again to continue"
    exit 143
fi
if ((last <= first)) && [[ $(scored_bytes) == "$scored" ]]; then
    say "job $job_id: stopped at step $last without a new step or score since its start; not started again"
    exit 1
fi
final=$(cat "$run/job/last_job" 2>/dev/null || true) # of a chain of jobs
if [[ -n $final && $final != "$job_id" ]]; then
    say "job $job_id: stopped at step $last; the next job of the chain goes on"
    exit 0
fi
touch "$run/job/requeues"
requeues=$(wc -l <"$run/job/requeues")
if ((requeues >= 20)); then
    say "job $job_id: stopped at step $last after $requeues requeues, no more are allowed; submit it again to continue"
    exit 1
fi
# A job that was cancelled meanwhile stays cancelled.
state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) || state=RUNNING # no answer is no reason to give up
if [[ $state != RUNNING ]]; then
    say "job $job_id: stopped at step $last; Slurm calls it ${state:-gone}, so it is not requeued here"
    exit 1
fi
echo "$job_id step $last" >>"$run/job/requeues"
say "job $job_id: stopped at step $last; requeued, $((requeues + 1)) of 20"
if ! scontrol requeue "$SLURM_JOB_ID"; then
    say "job $job_id: Slurm did not take it back; submit it again to continue"
    exit 1
fi
exit 85
