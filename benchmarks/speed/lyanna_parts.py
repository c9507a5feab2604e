"""What each part of Lyanna brings on the embedded target or on smollm2.

    python benchmarks/speed/lyanna_parts.py [--target smollm2] [--head FOLDER] [--other FOLDER ...]
        [--prompts 24] [--rounds 2] [--depth 8] [--out FILE.json]

All ways to draft take turns on the same prompts. Smaller hot sets and a head without token
information are made of the trained one by leaving parts out. Larger hot sets are made by adding
tokens that the table of token information does not know. Other heads were trained in another way,
and have the names of their folders. Beside FILE.json stands a picture.
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

Ways = dict[str, tuple[Method, HiddenDrafter | None]]

CHATS = Path(__file__).with_name("chat")
CHAIN = "chain, no reuse"  # the way that others are compared with
NEW_TOKENS = 128
COLUMNS = (
    "way",
    "tokens/s",
    "over the chain",
    "tau",
    "drafted",
    "draft ms a step",
    "steps that run the head",
    "overhead",
)


def without_information(head: HiddenDrafter) -> HiddenDrafter:
    """Return the head without token information."""
    other = copy.deepcopy(head)
    torch.nn.init.zeros_(other.answer.weight)
    return other


def hot(head: HiddenDrafter, size: int) -> HiddenDrafter:
    """Return the head for so many tokens, of which its own hot tokens come first."""
    other = HiddenDrafter(HiddenConfig(**head.config.to_dict() | {"hot_size": size})).eval()
    state = head.state_dict()
    cold = torch.ones(head.config.vocab_size, dtype=torch.bool)
    cold[head.hot] = False
    state["hot"] = torch.cat([head.hot, cold.nonzero()[:, 0]])[:size]
    if head.informed:
        answer = state["answer.weight"]
        missing = answer.new_zeros(len(cold) - len(answer), answer.shape[1])
        state["answer.weight"] = torch.cat([answer, missing])[:size]
    other.load_state_dict(state)
    return other


def ways(head: HiddenDrafter, depth: int) -> Ways:
    """Return all ways to draft with a head, by name; `depth` is that of the usual chain."""
    chain = Lyanna(depth=depth, reuse="off")
    table: Ways = {
        "ar": (method("ar"), None),
        CHAIN: (chain, head),
        "without token information": (chain, without_information(head)),
    }
    vocabulary = head.config.vocab_size
    for size in (vocabulary // 12, vocabulary // 6, vocabulary // 2, vocabulary):
        if abs(size - head.config.hot_size) > size // 100:
            table[f"hot set of {size:,} tokens"] = (chain, hot(head, size))
    is_deep = depth > 4
    for other in (depth // 2, 3 * depth // 4, 3 * depth // 2) if is_deep else range(1, 5):
        if other != depth:
            table[f"chain of {other}"] = (Lyanna(depth=other, reuse="off"), head)
    table |= ways_to_reuse(head, depth)
    for width, nodes in ((2, 12), (3, 16)) if is_deep else ((2, 4), (2, 6)):
        tree = Lyanna(depth=depth, width=width, nodes=nodes, reuse="off")
        table[f"tree, {width} beams, {nodes} nodes"] = (tree, head)
    return table | ways_of_pacer(head, is_deep)


def ways_to_reuse(head: HiddenDrafter, depth: int) -> Ways:
    """Return the ways to use the logits of old states again."""
    table: Ways = {}
    for weight in (0.25, 1.0):
        added = Lyanna(depth=depth, reuse="add", weight=weight)
        table[f"old logits added, weight {weight}"] = (added, head)
    table["old logits as a branch"] = (Lyanna(depth=depth, reuse="both"), head)
    in_a_pass = Lyanna(depth=depth, reuse="free", least=1)
    table["old logits in a pass of their own"] = (in_a_pass, head)
    for least in (2, 3):
        if least < depth:
            from_old = Lyanna(depth=depth, reuse="free", least=least)
            table[f"drafting from {least} old logits or more"] = (from_old, head)
    return table


def ways_of_pacer(head: HiddenDrafter, is_deep: bool) -> Ways:
    """Return the ways of `pacer-lyanna`."""
    table: Ways = {}
    block = 4 if is_deep else 2
    for size in (1, 2, 4, 8) if is_deep else (1, 2, 3):
        table[f"pacer-lyanna, blocks of {size}"] = (PacerLyanna(block=size), head)
    table["pacer-lyanna, no reuse"] = (PacerLyanna(block=block, reuse="off"), head)
    for least in (3, 4, 6) if is_deep else (2, 3, 4):
        from_old = PacerLyanna(block=block, reuse="free", least=least)
        table[f"pacer-lyanna, drafting from {least} old logits or more"] = (from_old, head)
    table["pacer-lyanna, 2 beams"] = (PacerLyanna(block=block, width=2), head)
    return table


def ways_of_another(name: str, head: HiddenDrafter, depth: int) -> Ways:
    """Return the ways of a head that was trained in another way.

    An EAGLE-like one has a way for all tokens too, because it has no table of them.
    """
    if head.config.kind == "lyanna":
        return {f"lyanna, {name}": (Lyanna(depth=depth, reuse="off"), head)}
    eagle = Eagle(depth=min(depth, 6))
    table: Ways = {f"eagle, {name}": (eagle, head)}
    if head.config.hot_size < head.config.vocab_size:
        table[f"eagle, {name}, all tokens"] = (eagle, hot(head, head.config.vocab_size))
    return table


def prompts_of(target: str, decoder: Decoder, split: str, count: int) -> list[list[int]]:
    """Return the first prompts of a split."""
    tokenizer = decoder.tokenizer
    assert tokenizer is not None
    if target == EMBEDDED:
        return [list(prompt) for prompt in held_out_prompts(tokenizer, split, count)]
    lines = (CHATS / f"{split}.jsonl").read_text().splitlines()[:count]
    return [chat_prompt(tokenizer, json.loads(line)["messages"]) for line in lines]


def decoders_of(target: Any, table: Ways, prompt: list[int]) -> dict[str, Decoder]:
    """Return a warm decoder for each way.

    All have the costs that the first one measures, because these differ from time to time.
    """
    decoders = {}
    costs = None
    for name, (way, head) in table.items():
        decoder = Decoder(target, None, None, way, False, head=head, prefix_bytes=0)
        if decoder.method.needs_costs and costs is not None:
            decoder = decoder.replace(costs=costs)
        decoder.generate([prompt], max_new_tokens=32, ignore_eos=True)
        costs = decoder.costs or costs
        decoders[name] = decoder
    return decoders


def take_turns(
    decoders: dict[str, Decoder], prompts: list[list[int]], rounds: int, ignore_eos: bool
) -> dict[str, list[dict[str, float]]]:
    """Return the figures of each way on each prompt. Raises AssertionError for unequal outputs."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in decoders}
    for _ in range(rounds):
        for prompt in prompts:
            reference = None
            for name, decoder in decoders.items():
                started_at = perf_counter()
                (result,) = decoder.generate(
                    [prompt], max_new_tokens=NEW_TOKENS, ignore_eos=ignore_eos
                )
                seconds = perf_counter() - started_at
                reference = reference or result.tokens
                assert result.tokens == reference, name
                runs[name].append(figures(result, seconds))
    return runs


def figures(result: Any, seconds: float) -> dict[str, float]:
    """Return the figures of one output."""
    steps = result.steps
    in_forwards = sum(step.forward_seconds for step in steps)
    return {
        "rate": len(result.tokens) / seconds,
        "tau": len(result.tokens) / len(steps),
        "drafted": sum(step.drafted for step in steps) / len(steps),
        "draft_ms": 1000 * sum(step.draft_seconds for step in steps) / len(steps),
        "drafting": sum(step.draft_forwards > 0 for step in steps) / len(steps),
        "overhead": 1 - in_forwards / sum(step.seconds for step in steps),
    }


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the medians of each way, and the harmonic mean of tau over its outputs."""
    chain_rates = [run["rate"] for run in runs[CHAIN]]
    table = {}
    for name, some in runs.items():
        row = {}
        for key in some[0]:
            row[key] = median(run[key] for run in some)
        pairs = zip(some, chain_rates, strict=True)
        row["ratio"] = median(run["rate"] / rate for run, rate in pairs)
        row["tau"] = len(some) / sum(1 / run["tau"] for run in some)
        table[name] = row
    return table


def show(table: dict[str, dict[str, float]]) -> None:
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" + "|---:" * (len(COLUMNS) - 1) + "|")
    for name, row in table.items():
        print(
            f"| {name} | {row['rate']:.0f} | {row['ratio']:.3f} | {row['tau']:.2f} | "
            f"{row['drafted']:.1f} | {row['draft_ms']:.2f} | {row['drafting']:.0%} | "
            f"{row['overhead']:.0%} |"
        )


def plot(table: dict[str, dict[str, float]], path: Path) -> None:
    """Draw tokens/s over the plain chain, and tau, of every way."""
    names = [name for name in table if name != "ar"]
    figure, axes = pyplot.subplots(
        1, 2, figsize=(10, 0.28 * len(names) + 1), sharey=True, layout="constrained"
    )
    panels = (("ratio", "tokens/s over the chain of 8"), ("tau", "tau"))
    for panel, (key, label) in zip(axes, panels, strict=True):
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
    args = parser.parse_args()
    base = load(args.target, method="ar")
    table = ways(load_head(args.head or companion(args.target, "lyanna"), base.target), args.depth)
    for folder in args.other:
        head = load_head(folder, base.target)
        table |= ways_of_another(Path(folder).name, head, args.depth)
    prompts = prompts_of(args.target, base, args.split, args.prompts)
    decoders = decoders_of(base.target, table, prompts[0])
    # The embedded target loops, so its outputs go on beyond an end token.
    runs = take_turns(decoders, prompts, args.rounds, ignore_eos=args.target == EMBEDDED)
    results = summary(runs)
    show(results)
    if args.out is not None:
        names = ("target", "depth", "prompts", "rounds", "split")
        arguments = {name: str(getattr(args, name)) for name in names}
        rounded = {}
        for name, row in results.items():
            rounded[name] = {key: round(value, 4) for key, value in row.items()}
        record = {"arguments": arguments, "versions": versions(), "ways": rounded}
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        plot(rounded, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
