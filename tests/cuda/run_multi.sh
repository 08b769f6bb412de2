#!/usr/bin/env bash
# What several GPUs of one host prove, over NCCL. Builds nothing: needs hcp importable.
#   tests/cuda/run_multi.sh [GPUS]
# Every part runs, whatever became of those before; a part that hangs is ended, and all of them
# within 8 minutes. Last a table, and exit code 1 where a part failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
gpus=${1:-$(nvidia-smi -L | wc -l)}
out=${OUT:-$(mktemp -d)}
all=470
. tests/cuda/parts.sh

ranks() { # NAME MOST_SECONDS SCRIPT OPTIONS...
  part "$1" "$2" python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" "${@:3}"
}

demo() { # NAME OPTIONS...
  part "$1" 60 python3 -m hcp demo --ranks "$gpus" --train-iters 4 --run-dir "$out/$1" "${@:2}"
}

ranks check_multi 120 tests/cuda/check_multi.py
ranks check_graphs 90 tests/cuda/check_graphs.py --transport peer nccl
part check_killed 150 python3 tests/cuda/check_killed.py --ranks "$gpus"
part check_late 120 python3 tests/cuda/check_late.py
part check_stamps 200 python3 tests/cuda/check_stamps.py
demo demo
demo demo-bfloat16 --dtype bfloat16
ranks check_eval 240 tests/cuda/check_eval.py
echo "$table"
exit "$failed"
