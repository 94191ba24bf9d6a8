"""A SLURM array in place of runs here: one task a run, which is this same command for that run alone."""

import shlex
from collections.abc import Sequence

SCRIPT = """#!/usr/bin/env bash
# {title}
#
#   sbatch {file}
#
# Each task makes one run, and knows it as finished when asked again. One that was preempted or ran out of time saves,
# and goes on when it is submitted again. When all are done:
#
#   {report}
#
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node={ranks}
#SBATCH --cpus-per-task={cpus}
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@300
#SBATCH --open-mode=append
#SBATCH --output={name}-%A-%a.out
set -euo pipefail
cd "${{SLURM_SUBMIT_DIR:?start this with sbatch}}"
source launch/setup.sh
exec "$PYTHON" {command} --only "$SLURM_ARRAY_TASK_ID"
"""


def array_script(family: str, arguments: Sequence[str], runs: int, ranks: int, file: str) -> str:
    """The text of `file`. `arguments` are the command's own, without --slurm."""
    command = shlex.join(["-m", "recipes.ablate", *arguments])
    return SCRIPT.format(
        title=f"The {runs} runs of family {family}.",
        file=file,
        report=f"python {command} --report_only",
        name=family,
        last=runs - 1,
        ranks=ranks,
        cpus=12 * ranks,
        command=command,
    )
