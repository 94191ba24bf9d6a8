#!/usr/bin/env bash
# From a clone to a trained model: installs into .venv, then trains the debug recipe on the text in this repository.
# CPU is enough, and no network is needed once installed. Run again, it goes on where it stopped.
#
#   ./launch/quickstart.sh [flags of recipes.pretrain]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/setup.sh
source launch/setup.sh

exec "$PYTHON" -m recipes.pretrain --job.config_file train_configs/hymo_debug.toml "$@"
