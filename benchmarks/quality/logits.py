"""Does verifying give the very bits of decoding token by token?

    python -m benchmarks.quality.logits --target FILE.gguf --methods ar,suffix \
        --dataset prompts.jsonl --out FILE.json

All options are those of `forerun bench`; nothing is timed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import run
from benchmarks.peers.hf import end_tokens
from forerun.api.load import Decoder
from forerun.backends.facts import facts_of
from forerun.bench.datasets import Prompt
from forerun.bench.models import load_decoders, load_prompts
from forerun.bench.plan import Plan
from forerun.bench.report import provenance
from forerun.cli.bench import bench, planned, progress
from forerun.engine.draft import Draft
from forerun.engine.target import Output
from forerun.files import write_text
from forerun.model.causal_lm import CausalLM
from forerun.sampling.params import SamplingParams


@dataclass(frozen=True)
class Truth:
    """A text by steps of one token.

    Attributes:
        text: the prompt and its greedy output.
        logits: [V] after each token of the text.
    """

    text: list[int]
    logits: list[Tensor]


@dataclass
class Compared:
    """What was compared of a method.

    Attributes:
        logits: rows of logits, of nodes that continue as the plain output does.
        differ: of these, how many had other bits.
        largest: greatest difference of two logits.
        outputs, outputs_differ: texts, and how many are not the plain one.
    """

    logits: int = 0
    differ: int = 0
    largest: float = 0.0
    outputs: int = 0
    outputs_differ: int = 0


def check_logits(
    plan: Plan, files: dict[str, list[Prompt]], say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Run every method of ours greedily, and compare the logits of each verified token.

    They are compared with those of a step of one token, after a prompt that was read token by
    token. `plan.batch` prompts stand in one batch, in any mix of lengths.
    """
    datasets, tokenizer = load_prompts(plan, files)
    decoders, target = load_decoders(plan, tokenizer)
    counts = {name: Compared() for name in decoders}
    prompts = [list(prompt.tokens or ()) for rows in datasets.values() for prompt in rows]
    for start in range(0, len(prompts), plan.batch):
        batch = prompts[start : start + plan.batch]
        truths = [_single_steps(target, prompt, plan.params()) for prompt in batch]
        for name, decoder in decoders.items():
            _compare(decoder, batch, truths, plan.params(), counts[name])
        say(f"{start + len(batch)} of {len(prompts)} prompts")
    return {
        "check_logits": {name: asdict(count) for name, count in counts.items()},
        "target": facts_of(target),
        "prompts": len(prompts),
        **provenance(plan.arguments()),
    }


@torch.inference_mode()
def _single_steps(target: CausalLM, prompt: Sequence[int], params: SamplingParams) -> Truth:
    """Return the greedy text of a prompt, and the logits after all its tokens."""
    model = target.fresh()
    text = list(prompt)
    logits: list[Tensor] = []
    ends = end_tokens(target.model, params)
    length = len(prompt) + params.max_new_tokens
    model.add(0, length)
    for place in range(length):
        (scores,) = model.forward([0], [Draft.root(text[place])]).logits
        model.commit([0], [[0]])
        logits.append(scores[0].clone())
        if place + 1 >= len(text):
            if place >= len(prompt) and text[place] in ends:
                break
            text.append(int(scores[0].argmax()))
    return Truth(text, logits)


def _compare(
    decoder: Decoder,
    prompts: list[list[int]],
    truths: list[Truth],
    params: SamplingParams,
    count: Compared,
) -> None:
    """Decode these prompts together, and compare every forward of the target."""
    target: Any = decoder.engine.target
    original = target.forward
    order: dict[int, int] = {}  # sequences are numbered as their prompts come

    def forward(ids: Sequence[int], drafts: Sequence[Draft], *rest: Any) -> Output:
        output = original(ids, drafts, *rest)
        for id in sorted(ids):
            order.setdefault(id, len(order))
        for id, draft, scores in zip(ids, drafts, output.logits, strict=True):
            _compare_nodes(target.length(id), draft, scores, truths[order[id]], count)
        return output

    target.forward = forward
    try:
        completions = decoder.generate(prompts, params)
    finally:
        del target.forward
    for prompt, truth, completion in zip(prompts, truths, completions, strict=True):
        plain = truth.text[len(prompt) : len(prompt) + len(completion.tokens)]
        count.outputs += 1
        count.outputs_differ += completion.tokens != plain


def _compare_nodes(start: int, draft: Draft, scores: Tensor, truth: Truth, count: Compared) -> None:
    """Compare the logits of those nodes whose path is the text's."""
    is_text = [False] * len(draft)
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        place = start + draft.depths[node]
        follows = not node or is_text[parent]
        is_text[node] = follows and place < len(truth.logits) and truth.text[place] == token
        if is_text[node]:
            count.logits += 1
            if not torch.equal(scores[node], truth.logits[place]):
                apart = float((scores[node] - truth.logits[place]).abs().max())
                count.differ += 1
                count.largest = max(count.largest, apart)


@wraps(bench)
def main(**given: Any) -> None:
    plan, files = planned(given | {"out": None})
    out: Path | None = given["out"]
    if plan.temperature:
        raise ValueError("logits are compared in greedy decoding")
    results = check_logits(plan, files, progress)
    progress("")
    if out is not None:
        write_text(out, json.dumps(results, indent=1) + "\n")
    if given["as_json"]:
        print(json.dumps(results))
        return
    target = results["target"]
    print(f"verified logits beside single steps': {target['weights']}, exact: {target['exact']}")
    for name, count in results["check_logits"].items():
        print(
            f"{name}: {count['differ']} of {count['logits']} logits with other bits, apart by at "
            f"most {count['largest']:.2g}; {count['outputs_differ']} of {count['outputs']} outputs "
            "differ"
        )


if __name__ == "__main__":
    run(main)
