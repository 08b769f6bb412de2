#!/usr/bin/env bash
# What ranks of two hosts prove, on the GPUs of one machine: 4 ranks on 2 GPUs, two a host, which NCCL
# takes for two hosts. Builds nothing: needs hcp importable.
#   tests/cuda/run_nodes.sh [RANKS]
# Every part runs, whatever became of those before; a part that hangs is ended, and all of them
# within 7 minutes. Last a table, and exit code 1 where a part failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
ranks=${1:-4} hosts=2
all=410
. tests/cuda/parts.sh

as_nodes() { # NAME MOST_SECONDS SCRIPT OPTIONS...
  part "$1" "$2" python3 -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    tests/cuda/as_nodes.py "$hosts" "${@:3}"
}

fails() { # NAME MOST_SECONDS SCRIPT OPTIONS...
  part "$1" "$2" python3 "$3" --ranks "$ranks" --hosts "$hosts" "${@:4}"
}

as_nodes check_multi 150 tests/cuda/check_multi.py --nodes "$hosts"
fails killed-mixed 110 tests/cuda/check_killed.py --transports mixed
fails late-mixed 80 tests/cuda/check_late.py --transports mixed
fails stamps-mixed 60 tests/cuda/check_stamps.py --transports mixed
fails killed-nccl 80 tests/cuda/check_killed.py --transports nccl --victims $((ranks - 1))
echo "$table"
exit "$failed"
