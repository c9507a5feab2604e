"""Calibrates a head of `benchmarks.training.gpu.heads` with forerun's own forward and saves it as `forerun train` would:

    python -m benchmarks.training.gpu.finish HEAD CHATS --out lyanna [--target smollm2]
    python -m benchmarks.training.bundle lyanna --target qwen-coder

CHATS is a folder with validation.jsonl. It prints the shares of greedy chains whose first 1, 2, ... tokens are
the target's, and the calibration.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.training.bundle import CURVE
from benchmarks.training.gpu.answers import LONGEST
from benchmarks.training.gpu.heads import LIMIT
from forerun.backends import prepare
from forerun.backends.heads import head_rows
from forerun.files import write_text
from forerun.heads.heads import HiddenDrafter
from forerun.train.head import measure
from forerun.train.labels import label
from forerun.train.loop import save_card
from forerun.train.run import Run
from forerun.train.texts import of_chats, read_chats
from forerun.zoo import QWEN_CODER, SMOLLM2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("head", type=Path)
    parser.add_argument("chats", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", choices=(QWEN_CODER, SMOLLM2), default=QWEN_CODER)
    parser.add_argument("--texts", type=int, default=40, help="of each source of questions")
    given = parser.parse_args()
    run = Run(given.target, given.out, chats=given.chats)
    head = HiddenDrafter.from_pretrained(given.head, dtype=torch.float32)
    config = head.config
    model = run.load(given.target, "target", frozen=True)
    target, embed = prepare(model), cast(Any, model.get_input_embeddings())
    rows, unroll = head_rows(target, head.hot, config.hidden_size), config.states
    known = read_chats(given.chats, "validation")
    sources = sorted({each.source for each in known})
    parts = [[each for each in known if each.source == source][: given.texts] for source in sources]
    held = of_chats([each for some in parts for each in some], LONGEST + LIMIT)
    survival, config.curves = measure(
        head, rows, label(run, target, held, states=True), embed, unroll
    )
    config.target, config.recipe = (
        target.fingerprint,
        config.recipe | {"validation": {"survival": survival}},
    )
    head.save_pretrained(run.out)
    log = map(json.loads, (given.head.parent / "log.jsonl").read_text().splitlines())
    curve = [[each["positions"], each["accepted"]] for each in log if each["run"] == config.kind]
    write_text(
        run.out / CURVE, json.dumps({"positions, accepted at places 1, 2, ...": curve}) + "\n"
    )
    shares = ", ".join(f"{share:.3f}" for share in survival)
    text = f"""It drafts from the hidden states of `{given.target}` and fits no other model: a fingerprint in
config.json is compared when it is loaded. benchmarks/training/gpu made it.

{sum(each.numel() for each in head.parameters()):,} parameters. On held-out output its greedy chains are the target's
own in their first 1, 2, ... tokens in these shares: {shares}."""
    save_card(
        run.out, f"A head of the kind {config.kind} for speculative decoding", text, config.recipe
    )
    print(survival, config.curves)


if __name__ == "__main__":
    main()
