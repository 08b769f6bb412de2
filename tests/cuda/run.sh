#!/usr/bin/env bash
# Everything that one GPU proves. Builds nothing: needs hcp importable, pytest and hypothesis.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
python3 -m pytest -q -p no:cacheprovider -o addopts= -m "not long" \
  tests/cuda tests/exchange/test_ops.py "$@"
