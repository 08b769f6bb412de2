#!/usr/bin/env bash
# What compute-sanitizer finds in the kernels, on one GPU. Builds nothing: needs hcp importable and pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
for tool in memcheck racecheck; do
  # Left out: kernels that must run at the same time, which a sanitizer may run one after the other,
  # and one that stops the device.
  look=(compute-sanitizer --tool "$tool" --error-exitcode 1 python3 -m pytest -q -p no:cacheprovider -o addopts=)
  "${look[@]}" -k "not while_they_are_staged and not aborted" tests/cuda/test_kernels_cuda.py "$@"
  "${look[@]}" -k "merge and cuda" tests/exchange/test_ops.py "$@"
done
