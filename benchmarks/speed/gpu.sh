#!/usr/bin/env bash
# Measures a pair on a machine with one GPU and no network, in five minutes at most.
#
#   OUT=results [DATA=folder of HumanEval.jsonl.gz] [TARGET=folder DRAFT=folder] \
#       benchmarks/speed/gpu.sh
#
# Without TARGET and DRAFT it is the embedded pair. Keep each part's results.json of the folder OUT.
# PYTHON, DEVICE, DTYPE, LIMIT (prompts) and TOKENS may be set: DEVICE=cpu tries it without a GPU.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TRANSFORMERS_VERBOSITY=error
PYTHON=${PYTHON:-python3} OUT=${OUT:-runs/gpu} DEVICE=${DEVICE:-cuda} DTYPE=${DTYPE:-bfloat16}
LIMIT=${LIMIT:-20} TOKENS=${TOKENS:-128}
SETS=(--dataset stdlib-test)
[ -n "${DATA:-}" ] && SETS=(--dataset "stdlib-test,$DATA/HumanEval.jsonl.gz")
PAIR=()
[ -n "${TARGET:-}" ] && PAIR=(--target "$TARGET" --draft "$DRAFT")
mkdir -p "$OUT"

part() { # seconds, name, arguments of forerun bench
  local seconds=$1 name=$2
  shift 2
  echo "== $name"
  timeout "$seconds" "$PYTHON" -m forerun bench "${PAIR[@]}" "$@" "${SETS[@]}" \
    --device "$DEVICE" --dtype "$DTYPE" --limit "$LIMIT" --rounds 1 --max-new-tokens "$TOKENS" \
    --out "$OUT/$name" || echo "$name did not end well: $?"
}

part 180 one --methods ar,sd,cumulative,suffix
part 120 four --methods ar,sd,suffix --batch 4
