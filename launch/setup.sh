# shellcheck shell=bash
# Sourced by the other scripts, in the repository's root: the virtual environment .venv with the tested versions
# (constraints.txt), made where it is missing or out of date. Leaves its interpreter in PYTHON.

say() { printf '%s\n' "$*" >&2; }

# A command may exist and still not start (version managers leave such stubs), so each is tried.
find_python() {
  local name
  for name in ${HYMO_PYTHON:+"$HYMO_PYTHON"} python3 python3.12 python3.11 python3.13 python; do
    if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      printf '%s\n' "$name"
      return
    fi
  done
  say "No Python 3.11 or newer with venv was found. Install one (Debian: apt-get install python3 python3-venv)," \
    "or name it: HYMO_PYTHON=/path/to/python3.12 $0"
  return 1
}

# What the environment was made from; it is made anew when this changes.
recipe_of_environment() {
  cat constraints.txt pyproject.toml launch/setup.sh
}

install() {
  local python
  python="$(find_python)"
  say "Making .venv with $("$python" --version) and installing what constraints.txt lists. The largest part is torch:" \
    "200 MB for CPU, some GB with CUDA (launch/environment.md says how to choose)."
  "$python" -m venv --clear .venv
  # With setuptools at hand the project itself needs no second, isolated environment to be built in.
  pip_install 'setuptools>=77'
  pip_install --constraint constraints.txt --no-build-isolation --editable '.[dev,data]'
  recipe_of_environment >.venv/made-from
}

# Progress and errors, without pip's remarks on its own configuration.
pip_install() {
  PYTHONWARNINGS=ignore .venv/bin/python -m pip install --disable-pip-version-check --root-user-action=ignore "$@" \
    2> >(grep --invert-match '^WARNING' >&2)
}

PYTHON="$PWD/.venv/bin/python"
if ! recipe_of_environment | cmp --silent - .venv/made-from; then
  install
fi
export PYTHON
