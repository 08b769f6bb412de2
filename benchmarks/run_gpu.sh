#!/usr/bin/env bash
# What the results pages of several GPUs need, in this order, one after the other: run nothing else
# on the machine. Builds nothing: needs hcp importable, and what each program compares with.
#   benchmarks/run_gpu.sh FOLDER [SECONDS] [PART...]
# Writes FOLDER/PART.log, and FOLDER/table.txt with exit codes and seconds. A part that hangs is
# ended, and all of them within SECONDS (1500). Without PART: all.
set -uo pipefail
folder=$(mkdir -p "${1:?FOLDER}" && cd "$1" && pwd) all=${2:-1500}
shift $(($# < 2 ? $# : 2))
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
wanted=" ${*:-gate exchange cut million states delta masks long mixed trainers trainers_wide \
  rollouts experts latent one kernels attention transformer_engine ladder} "
gpus=$(nvidia-smi -L | wc -l)
. tests/cuda/parts.sh

# Transformer Engine takes another cuDNN than torch's if the system has one: see docs/guides/gpus.md.
cudnn=$(python3 -c 'import nvidia.cudnn; print(list(nvidia.cudnn.__path__)[0])' 2>/dev/null) &&
  export CUDNN_HOME=$cudnn LD_LIBRARY_PATH=$cudnn/lib:${LD_LIBRARY_PATH:-}

run() { # NAME MOST_SECONDS COMMAND...
  [[ $wanted == *" $1 "* ]] || return 0
  part "$@" >"$folder/$1.log" 2>&1
  echo "$table" >"$folder/table.txt"
}

ranks() { # NAME MOST_SECONDS PROGRAM OPTIONS...
  run "$1" "$2" python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" "${@:3}"
}

engines=("te p2p fused" "te a2a fused")
ranks gate 330 benchmarks/bench_megatron.py --te "${engines[@]}" "te p2p flash" "te a2a flash" \
  --hcp hcp "wave greedy"
ranks exchange 90 benchmarks/bench_exchange.py
ranks cut 120 benchmarks/studies/cut_profile.py --packs one halves
ranks million 330 benchmarks/bench_million.py
ranks states 120 benchmarks/bench_states.py
# fla tunes its kernels first, and refuses the backward on Hopper with Triton 3.6.
ranks delta 200 benchmarks/bench_states.py --layer delta --passes forward
ranks masks 200 benchmarks/bench_masks.py --time --device cuda
run long 400 python3 benchmarks/bench_long.py --ranks "$gpus" --layers 4 \
  --tokens $((131072 * gpus)) --steps 4 --warm 1
run mixed 900 python3 benchmarks/bench_long.py --ranks "$gpus" --layers 4 --tokens 262144 \
  --sequences 8 --steps 4 --warm 1
run trainers 900 python3 benchmarks/bench_trainers.py --ranks 1 "$gpus" --families github \
  --sequences $((16 * gpus))
run trainers_wide 900 python3 benchmarks/bench_trainers.py --ranks "$gpus" --families byted constant \
  --model 8b --layers 4 --steps 16 --warm 6
ranks rollouts 300 benchmarks/bench_rollouts.py
ranks experts 200 benchmarks/bench_experts.py --expert-ranks "$gpus"
ranks latent 90 benchmarks/bench_latent.py
ranks one 170 benchmarks/bench_megatron.py --families one --tokens $((65536 * gpus)) --rounds 1 \
  --te "${engines[@]}" --hcp hcp --recompute --linear-loss --num-layers 16 --vocab-size 65536
run kernels 90 python3 benchmarks/bench_attention_kernels.py
ranks attention 190 benchmarks/bench_attention.py --packs one halves many --transports peer \
  --peers te_p2p te_all_gather te_a2a te_p2p_fa4 te_all_gather_fa4 te_a2a_fa4
ranks transformer_engine 120 tests/cuda/check_transformer_engine.py
run ladder 270 python3 benchmarks/bench_million.py --ladder --memory-gib 8 \
  --tokens $((65536 * gpus)) --rung-seconds 30 --deadline 260 --types p2p a2a --te te_p2p te_a2a \
  --peers
echo "$table"
exit "$failed"
