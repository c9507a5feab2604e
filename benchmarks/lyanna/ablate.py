"""What each part of Lyanna brings on the embedded target, all ways in turns on the same prompts:
python benchmarks/lyanna/ablate.py [--head FOLDER] [--other FOLDER ...] [--prompts 24] [--rounds 2]
    [--split validation] [--out FILE.json]

Smaller hot sets and a head without token information are made of the trained one by leaving out what they lack;
others are heads that were trained in another way, by the names of their folders. Beside FILE.json stands a picture.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import pyplot

from forerun import Decoder, load
from forerun.bench.report import versions
from forerun.loading import load_head
from forerun.methods import Eagle, Lyanna, Medusa, Method, PacerLyanna, method
from forerun.nn.heads import HiddenConfig, HiddenDrafter
from forerun.zoo import EMBEDDED, companion
from forerun.zoo.corpus import held_out_prompts

# Chains as deep as is best for each kind.
KINDS = {"lyanna": Lyanna(reuse="off"), "eagle": Eagle(depth=6), "medusa": Medusa()}


def without_information(head: HiddenDrafter) -> HiddenDrafter:
    other = copy.deepcopy(head)
    torch.nn.init.zeros_(other.answer.weight)
    return other


def hot(head: HiddenDrafter, share: float) -> HiddenDrafter:
    """The head for this share of the vocabulary, its most frequent tokens."""
    size = round(share * head.config.vocab_size)
    other = HiddenDrafter(HiddenConfig(**head.config.to_dict() | {"hot_size": size})).eval()
    whole = head.state_dict()
    other.load_state_dict(whole | {name: whole[name][:size] for name in ("hot", "answer.weight")})
    return other


def ways(head: HiddenDrafter) -> dict[str, tuple[Method, HiddenDrafter | None]]:
    chain = Lyanna(reuse="off")
    found: dict[str, tuple[Method, HiddenDrafter | None]] = {
        "ar": (method("ar"), None),
        "chain of 8, no reuse": (chain, head),
        "without token information": (chain, without_information(head)),
        **{f"hot set of {share:.0%}": (chain, hot(head, share)) for share in (0.125, 0.25, 0.5) if share < 1},
        **{f"chain of {depth}": (Lyanna(depth=depth, reuse="off"), head) for depth in (4, 6, 12)},
        **{f"old logits added, weight {w}": (Lyanna(reuse="add", weight=w), head) for w in (0.25, 1.0)},
        "old logits in a pass of their own": (Lyanna(reuse="free", least=1), head),
        **{f"drafting from {least} old logits or more": (Lyanna(reuse="free", least=least), head) for least in (2, 3)},
        **{
            f"tree, {width} beams, {nodes} nodes": (Lyanna(width=width, nodes=nodes, reuse="off"), head)
            for width, nodes in ((2, 12), (3, 16))
        },
        "pacer-lyanna": (PacerLyanna(), head),
        "pacer-lyanna, no reuse": (PacerLyanna(reuse="off"), head),
        **{
            f"pacer-lyanna, drafting from {least} old logits or more": (PacerLyanna(reuse="free", least=least), head)
            for least in (3, 4, 6)
        },
        **{f"pacer-lyanna, blocks of {block}": (PacerLyanna(block=block), head) for block in (1, 2, 8)},
        "pacer-lyanna, 2 beams": (PacerLyanna(width=2), head),
    }
    return found


def plot(table: dict[str, dict[str, float]], path: Path) -> None:
    """Draws tokens/s over the plain chain, and tau, of every way."""
    names = [name for name in table if name != "ar"]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 0.28 * len(names) + 1), sharey=True, layout="constrained")
    for panel, key, label in zip(axes, ("ratio", "tau"), ("tokens/s over the chain of 8", "tau"), strict=True):
        values = [table[name][key] for name in names]
        panel.barh(range(len(names)), values, color="#2a9d8f")
        for place, value in enumerate(values):
            panel.text(value, place, f" {value:.2f}", va="center", fontsize=7)
        panel.set(xlabel=label, xlim=(0, 1.15 * max(values)))
    axes[0].axvline(1, color="black", linewidth=0.8)
    axes[0].set_yticks(range(len(names)), names, fontsize=8)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--head", default=companion(EMBEDDED, "lyanna"))
    parser.add_argument("--other", action="append", default=[])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--split", default="validation")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    base = load(method="ar")
    decoders = {
        name: Decoder(base.target, None, None, way, False, head=head, prefix_bytes=0)
        for name, (way, head) in ways(load_head(asked.head, base.target)).items()
    }
    for folder in asked.other:
        head = load_head(folder, base.target)
        own = KINDS[head.config.kind]
        name = f"{own.name}, {Path(folder).name}"
        decoders[name] = Decoder(base.target, None, None, own, False, head=head, prefix_bytes=0)
    prompts = held_out_prompts(base.tokenizer, asked.split, asked.prompts)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in decoders}
    costs = None
    for decoder in decoders.values():
        if decoder.method.needs_costs:
            decoder.costs = costs  # those that the first one measures, as they differ from time to time
        decoder.generate(prompts[0], max_new_tokens=32, ignore_eos=True)
        costs = decoder.costs or costs
    for _ in range(asked.rounds):
        for prompt in prompts:
            reference = None
            for name, decoder in decoders.items():
                begun = perf_counter()
                result = decoder.generate(prompt, max_new_tokens=128, ignore_eos=True)
                seconds = perf_counter() - begun
                reference = reference or result.tokens
                assert result.tokens == reference, name
                steps = result.steps
                runs[name].append(
                    {
                        "rate": len(result.tokens) / seconds,
                        "tau": len(result.tokens) / len(steps),
                        "drafted": sum(step.drafted for step in steps) / len(steps),
                        "draft_ms": 1000 * sum(step.draft_seconds for step in steps) / len(steps),
                        "drafting": sum(step.draft_forwards > 0 for step in steps) / len(steps),
                        "overhead": 1 - sum(step.forward_seconds for step in steps) / sum(s.seconds for s in steps),
                    }
                )
    chain = [run["rate"] for run in runs["chain of 8, no reuse"]]
    table = {}
    print("| way | tokens/s | over the chain | tau | drafted | draft ms a step | steps that run the head | overhead |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, own in runs.items():
        row = {key: median(run[key] for run in own) for key in own[0]}
        row["ratio"] = median(run["rate"] / each for run, each in zip(own, chain, strict=True))
        row["tau"] = len(own) / sum(1 / run["tau"] for run in own)
        table[name] = {key: round(value, 4) for key, value in row.items()}
        print(
            f"| {name} | {row['rate']:.0f} | {row['ratio']:.3f} | {row['tau']:.2f} | {row['drafted']:.1f} | "
            f"{row['draft_ms']:.2f} | {row['drafting']:.0%} | {row['overhead']:.0%} |"
        )
    if asked.out is not None:
        arguments = {name: str(getattr(asked, name)) for name in ("prompts", "rounds", "split")}
        asked.out.write_text(
            json.dumps({"arguments": arguments, "versions": versions(), "ways": table}, indent=1) + "\n"
        )
        plot(table, asked.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
