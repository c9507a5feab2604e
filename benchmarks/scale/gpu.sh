#!/usr/bin/env bash
# The embedded pair at the costs of big models, on a machine with one GPU and no network: nine minutes at most.
#
#   OUT=results DATA=human_eval.jsonl benchmarks/scale/gpu.sh
#
# Of OUT, a folder, limit.json and each part's results.json are what to keep. PYTHON, DEVICE, DTYPE, LIMIT (prompts),
# TOKENS and the shapes may be set, which is how a CPU tries it (BIG=none leaves that part out).
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TRANSFORMERS_VERBOSITY=error
PYTHON=${PYTHON:-python3} OUT=${OUT:-runs/gpu} DEVICE=${DEVICE:-cuda} DTYPE=${DTYPE:-bfloat16}
LIMIT=${LIMIT:-20} TOKENS=${TOKENS:-128}
BIG=${BIG:-deepseek-coder-33b} BIG_DRAFT=${BIG_DRAFT:-deepseek-coder-1.3b}
SMALL=${SMALL:-llama-2-7b} SMALL_DRAFT=${SMALL_DRAFT:-llama-68m}
GRAPHS=--graphs; [ "$DEVICE" = cpu ] && GRAPHS=
SETS=(--dataset stdlib-test); [ -n "${DATA:-}" ] && SETS=(--dataset "stdlib-test,humaneval" --data "$DATA")
HEADS=(); [ -n "${HEAD:-}" ] && HEADS=(--head "$HEAD")
mkdir -p "$OUT"

part() { # seconds, name, arguments of forerun bench
  local seconds=$1 name=$2; shift 2
  echo "== $name"
  timeout "$seconds" "$PYTHON" -m forerun bench "$@" $GRAPHS "${SETS[@]}" --device "$DEVICE" --dtype "$DTYPE" --rounds 1 --profile \
    --max-new-tokens "$TOKENS" --out "$OUT/$name" || echo "$name did not end well: $?"
}

if [ "$DEVICE" != cpu ]; then
  timeout 90 "$PYTHON" -m pytest -q -x -p no:cacheprovider tests/test_recorded.py -k cuda 2>&1 | tail -n 30 \
    | tee "$OUT/tests.txt" || { echo "graphs are not right here: going on without"; GRAPHS=; }
  timeout 60 "$PYTHON" -m pytest -q -p no:cacheprovider tests/test_recorded.py -k not_waited_for 2>&1 | tail -n 30 \
    | tee -a "$OUT/tests.txt"  # a matter of speed alone
fi
shapes=("$SMALL" "$SMALL_DRAFT"); [ "$BIG" != none ] && shapes+=("$BIG" "$BIG_DRAFT")
"$PYTHON" benchmarks/scale/limit.py "$DEVICE" "$([ "$DTYPE" = float32 ] && echo 4 || echo 2)" "${shapes[@]}" | tee "$OUT/limit.json"

[ "$BIG" != none ] && part 210 big --target-shape "$BIG" --draft-shape "$BIG_DRAFT" --limit "$LIMIT" \
  --methods ar,sd,pacer,pacer-ouroboros,suffix
part 110 small --target-shape "$SMALL" --draft-shape "$SMALL_DRAFT" --limit "$LIMIT" \
  --methods ar,sd,lyanna,pacer-lyanna,pacer "${HEADS[@]}"
part 110 small-4 --target-shape "$SMALL" --draft-shape "$SMALL_DRAFT" --limit "$LIMIT" --batch 4 \
  --methods ar,sd,lyanna,pacer-lyanna "${HEADS[@]}"
