#!/usr/bin/env bash
# What several GPUs of one host prove, over NCCL. Builds nothing: needs hcp importable.
#   tests/cuda/run_multi.sh [GPUS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
gpus=${1:-$(nvidia-smi -L | wc -l)}
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=4
timeout 240 python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" tests/cuda/check_multi.py
timeout 240 python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" tests/cuda/check_eval.py
timeout 200 python3 tests/cuda/check_killed.py --ranks "$gpus"
timeout 400 python3 tests/cuda/check_late.py
timeout 120 python3 -m hcp demo --ranks "$gpus" --train-iters 4 --run-dir "${OUT:-/tmp}/demo"
timeout 120 python3 -m hcp demo --ranks "$gpus" --train-iters 4 --dtype bfloat16 --run-dir "${OUT:-/tmp}/demo-bfloat16"
