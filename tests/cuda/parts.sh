# Sourced by run_multi.sh and run_nodes.sh, which set `all`: the seconds of all parts together.
# Every part runs, whatever became of those before; a part that hangs is ended. `table` tells of each,
# and `failed` is 1 where one failed.
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=4
failed=0 table=$(printf '%-14s %4s %8s' part exit seconds)

part() { # NAME MOST_SECONDS COMMAND...
  local name=$1 most=$2 left=$((all - SECONDS)) begun=$SECONDS code=0
  shift 2
  echo "== $name"
  if ((left < 10)); then
    code=124 # as where timeout ends it
  else
    timeout --kill-after=10 "$((left < most ? left : most))" "$@" || code=$?
  fi
  ((code == 0)) || failed=1
  table+=$'\n'$(printf '%-14s %4d %8d' "$name" "$code" $((SECONDS - begun)))
}
