"""What each part of Lyanna brings on the embedded target or on smollm2, all ways in turns on the same prompts:
python benchmarks/speed/lyanna_parts.py [--target smollm2] [--head FOLDER] [--other FOLDER ...] [--prompts 24] [--rounds 2]
    [--depth 8] [--out FILE.json]

Smaller hot sets and a head without token information are made of the trained one by leaving out what they lack, larger
ones by adding tokens that the table of token information knows nothing of; others are heads that were trained in
another way, by the names of their folders. Beside FILE.json stands a picture.
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
from forerun.api.layers import load_head
from forerun.bench.report import versions
from forerun.heads.heads import HiddenConfig, HiddenDrafter
from forerun.methods import Eagle, Lyanna, Method, PacerLyanna, method
from forerun.text.chat import chat_prompt
from forerun.train.corpus import held_out_prompts
from forerun.zoo import EMBEDDED, SMOLLM2, companion

CHATS = Path(__file__).parent.parent / "chat" / "validation.jsonl"
CHAIN = "chain, no reuse"


def without_information(head: HiddenDrafter) -> HiddenDrafter:
    other = copy.deepcopy(head)
    torch.nn.init.zeros_(other.answer.weight)
    return other


def hot(head: HiddenDrafter, size: int) -> HiddenDrafter:
    """The head for so many tokens: the most frequent ones of its hot set, or that and others."""
    other = HiddenDrafter(HiddenConfig(**head.config.to_dict() | {"hot_size": size})).eval()
    whole = head.state_dict()
    cold = torch.ones(head.config.vocab_size, dtype=torch.bool)
    cold[head.hot] = False
    tokens = torch.cat([head.hot, cold.nonzero()[:, 0]])[:size]
    whole |= {"hot": tokens}
    if head.informed:
        answer = whole["answer.weight"]
        whole["answer.weight"] = torch.cat(
            [answer, answer.new_zeros(len(cold) - len(answer), answer.shape[1])]
        )[:size]
    other.load_state_dict(whole)
    return other


def ways(head: HiddenDrafter, depth: int) -> dict[str, tuple[Method, HiddenDrafter | None]]:
    chain = Lyanna(depth=depth, reuse="off")
    whole = head.config.vocab_size
    depths = (depth // 2, 3 * depth // 4, 3 * depth // 2) if depth > 4 else range(1, 5)
    blocks, block = ((1, 2, 4, 8), 4) if depth > 4 else ((1, 2, 3), 2)
    leasts = (3, 4, 6) if depth > 4 else (2, 3, 4)
    beams = ((2, 12), (3, 16)) if depth > 4 else ((2, 4), (2, 6))
    found: dict[str, tuple[Method, HiddenDrafter | None]] = {
        "ar": (method("ar"), None),
        CHAIN: (chain, head),
        "without token information": (chain, without_information(head)),
        **{
            f"hot set of {size:,} tokens": (chain, hot(head, size))
            for size in (whole // 12, whole // 6, whole // 2, whole)
            if abs(size - head.config.hot_size) > size // 100
        },
        **{
            f"chain of {each}": (Lyanna(depth=each, reuse="off"), head)
            for each in depths
            if each != depth
        },
        **{
            f"old logits added, weight {w}": (Lyanna(depth=depth, reuse="add", weight=w), head)
            for w in (0.25, 1.0)
        },
        "old logits as a branch": (Lyanna(depth=depth, reuse="both"), head),
        "old logits in a pass of their own": (Lyanna(depth=depth, reuse="free", least=1), head),
        **{
            f"drafting from {least} old logits or more": (
                Lyanna(depth=depth, reuse="free", least=least),
                head,
            )
            for least in (2, 3)
            if least < depth
        },
        **{
            f"tree, {width} beams, {nodes} nodes": (
                Lyanna(depth=depth, width=width, nodes=nodes, reuse="off"),
                head,
            )
            for width, nodes in beams
        },
        **{f"pacer-lyanna, blocks of {each}": (PacerLyanna(block=each), head) for each in blocks},
        "pacer-lyanna, no reuse": (PacerLyanna(block=block, reuse="off"), head),
        **{
            f"pacer-lyanna, drafting from {least} old logits or more": (
                PacerLyanna(block=block, reuse="free", least=least),
                head,
            )
            for least in leasts
        },
        "pacer-lyanna, 2 beams": (PacerLyanna(block=block, width=2), head),
    }
    return found


def others(name: str, head: HiddenDrafter, depth: int) -> dict[str, tuple[Method, HiddenDrafter]]:
    """A head that was trained in another way; an EAGLE-like one for all tokens too, as it has no table of them."""
    if head.config.kind == "lyanna":
        return {f"lyanna, {name}": (Lyanna(depth=depth, reuse="off"), head)}
    way = Eagle(depth=min(depth, 6))
    found = {f"eagle, {name}": (way, head)}
    if head.config.hot_size < head.config.vocab_size:
        found[f"eagle, {name}, all tokens"] = way, hot(head, head.config.vocab_size)
    return found


def prompts_of(target: str, decoder: Decoder, split: str, count: int) -> list[list[int]]:
    tokenizer = decoder.tokenizer
    assert tokenizer is not None
    if target == EMBEDDED:
        return [list(each) for each in held_out_prompts(tokenizer, split, count)]
    lines = CHATS.with_name(f"{split}.jsonl").read_text().splitlines()[:count]
    return [chat_prompt(tokenizer, json.loads(line)["messages"]) for line in lines]


def plot(table: dict[str, dict[str, float]], path: Path) -> None:
    """Draws tokens/s over the plain chain, and tau, of every way."""
    names = [name for name in table if name != "ar"]
    figure, axes = pyplot.subplots(
        1, 2, figsize=(10, 0.28 * len(names) + 1), sharey=True, layout="constrained"
    )
    for panel, key, label in zip(
        axes, ("ratio", "tau"), ("tokens/s over the chain of 8", "tau"), strict=True
    ):
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
    parser.add_argument("--target", default=EMBEDDED, choices=(EMBEDDED, SMOLLM2))
    parser.add_argument(
        "--depth", type=int, default=8, help="of the chain that others are compared with"
    )
    parser.add_argument("--head")
    parser.add_argument("--other", action="append", default=[])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--split", default="validation")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    base = load(asked.target, method="ar")
    every = ways(
        load_head(asked.head or companion(asked.target, "lyanna"), base.target), asked.depth
    )
    for folder in asked.other:
        every |= others(Path(folder).name, load_head(folder, base.target), asked.depth)
    decoders = {
        name: Decoder(base.target, None, None, way, False, head=head, prefix_bytes=0)
        for name, (way, head) in every.items()
    }
    prompts, loops = (
        prompts_of(asked.target, base, asked.split, asked.prompts),
        asked.target == EMBEDDED,
    )
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in decoders}
    costs = None
    for name, decoder in decoders.items():
        if decoder.method.needs_costs and costs is not None:
            # Those that the first one measures, as they differ from time to time.
            decoder = decoders[name] = decoder.replace(costs=costs)
        decoder.generate([prompts[0]], max_new_tokens=32, ignore_eos=True)
        costs = decoder.costs or costs
    for _ in range(asked.rounds):
        for prompt in prompts:
            reference = None
            for name, decoder in decoders.items():
                begun = perf_counter()
                (result,) = decoder.generate([prompt], max_new_tokens=128, ignore_eos=loops)
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
                        "overhead": 1
                        - sum(step.forward_seconds for step in steps)
                        / sum(s.seconds for s in steps),
                    }
                )
    chain = [run["rate"] for run in runs[CHAIN]]
    table = {}
    print(
        "| way | tokens/s | over the chain | tau | drafted | draft ms a step | steps that run the head | overhead |"
    )
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
        arguments = {
            name: str(getattr(asked, name))
            for name in ("target", "depth", "prompts", "rounds", "split")
        }
        asked.out.write_text(
            json.dumps({"arguments": arguments, "versions": versions(), "ways": table}, indent=1)
            + "\n"
        )
        plot(table, asked.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
