"""Calibrates a head of `benchmarks.training.gpu.heads`, and saves it as `forerun train` would.

    python -m benchmarks.training.gpu.finish HEAD CHATS --out lyanna [--target smollm2]
    python -m benchmarks.training.bundle lyanna --target qwen-coder

It uses forerun's own forward. CHATS is a folder with validation.jsonl. It prints the shares of
greedy chains whose first 1, 2, ... tokens are the target's, and the calibration.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.training.bundle import CURVE
from benchmarks.training.gpu.answers import PROMPT_TOKENS
from benchmarks.training.gpu.heads import ANSWER_TOKENS
from forerun.backends import prepare
from forerun.backends.heads import head_rows
from forerun.files import write_text
from forerun.heads.heads import HiddenDrafter
from forerun.train.head import measure
from forerun.train.labels import label
from forerun.train.loop import save_card
from forerun.train.run import Run
from forerun.train.texts import Texts, of_chats, read_chats
from forerun.zoo import QWEN_CODER, SMOLLM2


def held_out(chats: Path, count: int) -> Texts:
    """Return held-out texts, so many of each source of questions."""
    known = read_chats(chats, "validation")
    chosen = []
    for source in sorted({conversation.source for conversation in known}):
        chosen += [conversation for conversation in known if conversation.source == source][:count]
    return of_chats(chosen, PROMPT_TOKENS + ANSWER_TOKENS)


def curve(log: Path, kind: str) -> list[list[Any]]:
    """Return positions and accepted shares of a head's training."""
    lines = map(json.loads, log.read_text().splitlines())
    return [[line["positions"], line["accepted"]] for line in lines if line["run"] == kind]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("head", type=Path)
    parser.add_argument("chats", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", choices=(QWEN_CODER, SMOLLM2), default=QWEN_CODER)
    parser.add_argument("--texts", type=int, default=40, help="of each source of questions")
    args = parser.parse_args()
    run = Run(args.target, args.out, chats=args.chats)
    head = HiddenDrafter.from_pretrained(args.head, dtype=torch.float32)
    config = head.config
    model = run.load(args.target, "target", frozen=True)
    target = prepare(model)
    embed = cast(Any, model.get_input_embeddings())
    rows = head_rows(target, head.hot, config.hidden_size)
    labels = label(run, target, held_out(args.chats, args.texts), states=True)
    survival, config.curves = measure(head, rows, labels, embed, config.states)
    config.target = target.fingerprint
    config.recipe = config.recipe | {"validation": {"survival": survival}}
    head.save_pretrained(run.out)
    points = curve(args.head.parent / "log.jsonl", config.kind)
    record = {"positions, accepted at places 1, 2, ...": points}
    write_text(run.out / CURVE, json.dumps(record) + "\n")
    shares = ", ".join(f"{share:.3f}" for share in survival)
    parameters = sum(parameter.numel() for parameter in head.parameters())
    text = f"""It drafts from the hidden states of `{args.target}` and fits no other model: a
fingerprint in config.json is compared when it is loaded. benchmarks/training/gpu made it.

{parameters:,} parameters. On held-out output its greedy chains are the target's own in their first
1, 2, ... tokens in these shares: {shares}."""
    title = f"A head of the kind {config.kind} for speculative decoding"
    save_card(run.out, title, text, config.recipe)
    print(survival, config.curves)


if __name__ == "__main__":
    main()
