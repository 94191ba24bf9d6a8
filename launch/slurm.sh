#!/usr/bin/env bash
# A recipe on several nodes under SLURM, through preemption, time limits and node failures.
#
#   sbatch --nodes=4 launch/slurm.sh train_configs/hymo_primary.toml [flags of recipes.pretrain]
#
# One task a GPU; SLURM itself is the launcher, so that its SIGTERM reaches the training processes directly, and they
# have as long as SLURM gives them to save. (torchrun would kill them after 30 s.) Five minutes before the time limit,
# and on preemption, they save and exit 0, and the job goes back into the queue; it goes on from its newest checkpoint.
# Needs .venv (launch/setup.sh) and the dump folder on a file system that all nodes share.
#
#SBATCH --job-name=hymo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=hymo-%j.out
set -euo pipefail
# SLURM runs a copy of this file, so the repository is where sbatch was called.
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
if [[ $# -lt 1 || ! -f launch/setup.sh ]]; then
  echo "usage, in the repository's root: sbatch --nodes=N launch/slurm.sh RECIPE.toml [flags of recipes.pretrain]" >&2
  exit 2
fi
# shellcheck source=launch/setup.sh
source launch/setup.sh

recipe="$1"
shift
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
MASTER_ADDR="${hosts%%$'\n'*}"
MASTER_PORT="$((20000 + SLURM_JOB_ID % 20000))"
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"

# On preemption SLURM itself does both. SIGTERM is not trapped: scancel sends it, and a cancelled job stays cancelled.
again=no
trap 'again=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1 # to the tasks, not to this script

# shellcheck disable=SC2016 # the variables are each task's own
srun --kill-on-bad-exit=1 bash -c '
  export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"
  exec "$PYTHON" -m recipes.pretrain --job.config_file "$@"' task "$recipe" "$@" &
tasks=$!

# A trapped signal ends `wait` early; the tasks are still saving then.
status=0
wait "$tasks" || status=$?
while kill -0 "$tasks" 2>/dev/null; do
  status=0
  wait "$tasks" || status=$?
done

if [[ "$again" == yes && "$status" -eq 0 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
