#!/usr/bin/env bash
# The tests, in the same environment as the quickstart. Ends with pytest's own line.
#
#   ./launch/test.sh [flags of pytest]      --heavy adds production-size and slow tests
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/setup.sh
source launch/setup.sh

# Two at a time, file by file: half of the tests wait for ranks of their own.
exec "$PYTHON" -m pytest --numprocesses 2 --dist loadfile "$@"
