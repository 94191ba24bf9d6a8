#!/usr/bin/env bash
# A recipe on all GPUs of this machine, or on as many CPU processes as RANKS says.
#
#   ./launch/local.sh train_configs/hymo_primary.toml [flags of recipes.pretrain]
#   RANKS=2 ./launch/local.sh train_configs/hymo_debug.toml
#
# RESTARTS=3 starts all ranks again, from the newest checkpoint, up to 3 times after one has failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $# -lt 1 ]]; then
  echo "usage: ./launch/local.sh RECIPE.toml [flags of recipes.pretrain]" >&2
  exit 2
fi
# shellcheck source=launch/setup.sh
source launch/setup.sh

recipe="$1"
shift
gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
ranks="${RANKS:-$gpus}"
if [[ "$ranks" -eq 0 ]]; then
  echo "This machine has no GPU that torch can use. RANKS=2 $0 ... trains on 2 CPU processes." >&2
  exit 2
fi

exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node="$ranks" --max_restarts="${RESTARTS:-0}" \
  -m recipes.pretrain --job.config_file "$recipe" "$@"
