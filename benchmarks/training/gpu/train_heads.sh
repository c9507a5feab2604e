#!/usr/bin/env bash
# Trains heads of qwen-coder on one GPU in under 30 minutes, from the answers in git: that of the
# package's form, an EAGLE-like one of its size, steps and data, and, while minutes are left, short
# runs that change one part each.
#
#   OUT=heads benchmarks/training/gpu/train_heads.sh
#
# It goes on where it was stopped. PYTHON and DEVICE may be set, and MINUTES (25), after which no
# short run begins. More arguments may be given; this tries it without a GPU:
#
#   DEVICE=cpu benchmarks/training/gpu/train_heads.sh --sample 4 2 --batch 64 --part 64 --steps 2 \
#       --short-steps 1
#
# `forerun fetch qwen-coder` comes first.
set -euo pipefail
cd "$(dirname "$0")/../../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
OUT=${OUT:-runs/heads}
mkdir -p "$OUT/chats"
tar -xJf benchmarks/training/qwen-coder-answers.tar.xz -C "$OUT/chats"
"${PYTHON:-python3}" -m benchmarks.training.gpu.heads --out "$OUT" --device "${DEVICE:-cuda}" \
    --until $((60 * ${MINUTES:-25})) "$@"
