#!/usr/bin/env bash
# A pair on a machine with one GPU and no network: nine minutes at most.
#
#   OUT=results DATA=human_eval.jsonl [TARGET=folder DRAFT=folder] benchmarks/scale/gpu.sh
#
# Without TARGET and DRAFT it is the embedded pair. Of OUT, a folder, tests.txt and each part's results.json are what to
# keep. PYTHON, DEVICE, DTYPE, LIMIT (prompts) and TOKENS may be set: DEVICE=cpu tries it without a GPU.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TRANSFORMERS_VERBOSITY=error
PYTHON=${PYTHON:-python3} OUT=${OUT:-runs/gpu} DEVICE=${DEVICE:-cuda} DTYPE=${DTYPE:-bfloat16}
LIMIT=${LIMIT:-20} TOKENS=${TOKENS:-128}
GRAPHS=--graphs; [ "$DEVICE" = cpu ] && GRAPHS=
SETS=(--dataset stdlib-test); [ -n "${DATA:-}" ] && SETS=(--dataset "stdlib-test,$DATA/HumanEval.jsonl.gz")
PAIR=(); [ -n "${TARGET:-}" ] && PAIR=(--target "$TARGET" --draft "$DRAFT")
mkdir -p "$OUT"

part() { # seconds, name, arguments of forerun bench
  local seconds=$1 name=$2; shift 2
  echo "== $name"
  timeout "$seconds" "$PYTHON" -m forerun bench "${PAIR[@]}" "$@" "${SETS[@]}" --device "$DEVICE" --dtype "$DTYPE" \
    --limit "$LIMIT" --rounds 1 --max-new-tokens "$TOKENS" --out "$OUT/$name" || echo "$name did not end well: $?"
}

if [ "$DEVICE" != cpu ]; then
  timeout 90 "$PYTHON" -m pytest -q -x -p no:cacheprovider tests/test_recorded.py -k cuda 2>&1 | tail -n 30 \
    | tee "$OUT/tests.txt" || { echo "graphs are not right here: going on without"; GRAPHS=; }
fi
part 180 one $GRAPHS --methods ar,sd,cumulative,suffix
part 120 plain-forward --methods ar,sd
part 120 four $GRAPHS --methods ar,sd,suffix --batch 4
