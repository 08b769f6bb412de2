#!/usr/bin/env bash
# Real trainers on the GPUs of one host, over NCCL. Builds nothing: needs hcp importable and torch.
#   WHEELS=folder tests/cuda/run_trainers.sh [GPUS]
# WHEELS holds wheels for this Python, all of which are installed for the run: of Megatron-Core 0.19.2, and,
# where Transformers is not there, of what the extra of this name needs beside torch; else it is left out.
#   pip download --no-deps --python-version 3.12 --only-binary=:all: -d folder megatron-core==0.19.2
# SECONDS_EACH (60) ends a run that hangs, SECONDS_ALL (400) leaves out what no time is left for.
# The runs of most interest come first: tokens per second of dynamic against static CP, of a GPT of
# 1 B parameters on the lengths of two families (benchmarks/common/families.py) in real text; then small
# models in float32 under other layouts. check_trainers.py runs the other trainers, and peers without
# hcp. Last a table, and exit code 1 where a run failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
gpus=${1:-$(nvidia-smi -L | wc -l)}
each=${SECONDS_EACH:-60} all=${SECONDS_ALL:-400}
work=$(mktemp -d)
logs=${OUT:-$work}
trap 'rm -rf "$work"' EXIT
timeout 60 python3 -m pip install --quiet --no-deps --no-index --target "$work/site" \
  "${WHEELS:?names the folder of wheels}"/*.whl || exit
export PYTHONPATH="$PWD:$work/site${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=4 PYTHONWARNINGS=ignore
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
failed=0
table=$(printf '%-24s %8s %8s %12s %14s' run result seconds dyn/static 'losses apart')

train() { # NAME OPTIONS...: one run, its log in a file, its line in the table
  local name=$1 left=$((all - SECONDS)) begun=$SECONDS result=ok log
  shift
  log=$logs/${name// /-}.log
  if ((left < 10)); then
    table+=$'\n'$(printf '%-24s %8s' "$name" 'no time')
    return
  fi
  timeout --kill-after=10 "$((left < each ? left : each))" \
    python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" \
    -m hcp.integrations.megatron --device cuda "$@" >"$log" 2>&1 || { result="exit $?" failed=1; }
  echo "== $name: $*"
  tail -n 24 "$log"
  table+=$'\n'$(printf '%-24s %8s %8d %12s %14s' "$name" "$result" $((SECONDS - begun)) \
    "$(said 'dynamic / static tokens' "$log")" "$(said 'largest difference' "$log")")
}

finetune() { # NAME GPUS OPTIONS...: both models of Transformers; the larger difference of losses
  local name=$1 log=$logs/${1// /-}.log result=ok begun=$SECONDS
  local left=$((all - SECONDS)) missing=''
  ((left < 10)) && missing='no time'
  python3 -c 'import hcp.integrations.transformers' || missing='left out'
  if [[ $missing ]]; then
    table+=$'\n'$(printf '%-24s %8s' "$name" "$missing")
    return
  fi
  timeout --kill-after=10 "$((left < each ? left : each))" \
    python3 -m torch.distributed.run --standalone --nproc-per-node "$2" \
    -m hcp.integrations.transformers --device cuda "${@:3}" >"$log" 2>&1 || { result="exit $?" failed=1; }
  echo "== $name: ${*:3}"
  tail -n 24 "$log"
  table+=$'\n'$(printf '%-24s %8s %8d %12s %14s' "$name" "$result" $((SECONDS - begun)) - \
    "$(sed -n 's/^largest difference of losses *//p' "$log" | sort -g | tail -n 1)")
}

said() { # WORDS LOG: the number behind the words
  sed -n "s/^$(sed 's:/:\\/:g' <<<"$1").*: //p" "$2"
}

one_billion=(
  --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16
  --num-query-groups 4 --bf16 --use-distributed-optimizer --lr 1e-4
  --max-length $((8192 * gpus)) --max-seqlen-per-dp-cp-rank 8192 --eval-documents 9
)
for family in P2 P3; do
  timeout 30 python3 tests/cuda/write_family.py "$family" $((8192 * gpus)) >"$work/$family.jsonl"
  batch=$([ "$family" = P2 ] && echo $((16 * gpus)) || echo $((2 * gpus)))
  train "1B $family" "${one_billion[@]}" --data "$work/$family.jsonl" \
    --train-iters "${STEPS:-4}" --global-batch-size "$batch"
done

small=(--train-iters 3 --max-length 4096 --eval-documents 9)
train 'small' "${small[@]}"
if ((gpus % 4 == 0)); then
  train 'tensor 2' "${small[@]}" --tensor-model-parallel-size 2
  train 'pipeline 2' "${small[@]}" --pipeline-model-parallel-size 2
  train 'experts 2' "${small[@]}" --num-experts 8 --moe-ffn-hidden-size 128 \
    --expert-model-parallel-size 2
  train 'levels 2 2' "${small[@]}" --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2
fi
if ((gpus >= 2)); then
  finetune 'Transformers' 2 --train-iters 4 --max-length 4096 --eval-documents 9
fi
train 'distributed MTP' "${small[@]}" --use-distributed-optimizer --mtp-num-layers 1
printf '\n%s\n' "$table"
exit $failed
