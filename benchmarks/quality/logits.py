"""Whether verifying gives the very bits of decoding token by token.

    python -m benchmarks.quality.logits --target FILE.gguf --methods ar,suffix --dataset prompts.jsonl --out FILE.json

Takes the options of `forerun bench`; nothing is timed.
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

Truth = tuple[
    list[int], list[Tensor]
]  # a text, and the logits [V] behind each of its tokens, from steps of one token


@dataclass
class Compared:
    """What was looked at for a method.

    Attributes:
        logits: rows of logits compared: those of nodes that go on as the plain output does.
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
    """Runs every method of ours greedily and compares each verified token's logits with those of a step of its own,
    behind a prompt that was read token by token. `plan.batch` prompts stand in one batch, in any mix of lengths."""
    datasets, tokenizer = load_prompts(plan, files)
    decoders, target = load_decoders(plan, tokenizer)
    found = {name: Compared() for name in decoders}
    prompts = [list(prompt.tokens or ()) for each in datasets.values() for prompt in each]
    for start in range(0, len(prompts), plan.batch):
        batch = prompts[start : start + plan.batch]
        truths = [_single_steps(target, prompt, plan.params()) for prompt in batch]
        for name, decoder in decoders.items():
            _compare(decoder, batch, truths, plan.params(), found[name])
        say(f"{start + len(batch)} of {len(prompts)} prompts")
    return {
        "check_logits": {name: asdict(each) for name, each in found.items()},
        "target": facts_of(target),
        "prompts": len(prompts),
        **provenance(plan.arguments()),
    }


@torch.inference_mode()
def _single_steps(target: CausalLM, prompt: Sequence[int], params: SamplingParams) -> Truth:
    """The greedy text behind a prompt, and the logits behind all tokens."""
    model, text, logits = target.fresh(), list(prompt), []
    ends = end_tokens(target.model, params)
    model.add(0, len(prompt) + params.max_new_tokens)
    for place in range(len(prompt) + params.max_new_tokens):
        (scores,) = model.forward([0], [Draft.root(text[place])]).logits
        model.commit([0], [[0]])
        logits.append(scores[0].clone())
        if place + 1 >= len(text):
            if place >= len(prompt) and text[place] in ends:
                break
            text.append(int(scores[0].argmax()))
    return text, logits


def _compare(
    decoder: Decoder,
    prompts: list[list[int]],
    truths: list[Truth],
    params: SamplingParams,
    found: Compared,
) -> None:
    """Decodes these prompts together and looks at every forward of the target."""
    target: Any = decoder.engine.target
    own = target.forward
    order: dict[int, int] = {}

    def forward(ids: Sequence[int], drafts: Sequence[Draft], *rest: Any) -> Output:
        output = own(ids, drafts, *rest)
        for id in sorted(ids):
            order.setdefault(id, len(order))  # sequences are numbered as their prompts come
        for id, draft, scores in zip(ids, drafts, output.logits, strict=True):
            _look(target.length(id), draft, scores, truths[order[id]], found)
        return output

    target.forward = forward
    try:
        done = decoder.generate(prompts, params)
    finally:
        del target.forward
    for prompt, (text, _), completion in zip(prompts, truths, done, strict=True):
        found.outputs += 1
        found.outputs_differ += (
            completion.tokens != text[len(prompt) : len(prompt) + len(completion.tokens)]
        )


def _look(start: int, draft: Draft, scores: Tensor, truth: Truth, found: Compared) -> None:
    """Compares the logits of those nodes whose path is the text's."""
    text, logits = truth
    true = [False] * len(draft)
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        place = start + draft.depths[node]
        true[node] = (not node or true[parent]) and place < len(logits) and text[place] == token
        if true[node]:
            found.logits += 1
            if not torch.equal(scores[node], logits[place]):
                found.differ += 1
                found.largest = max(
                    found.largest, float((scores[node] - logits[place]).abs().max())
                )


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
    print(
        f"verified logits beside single steps': {results['target']['weights']}, exact: {results['target']['exact']}"
    )
    for name, each in results["check_logits"].items():
        print(
            f"{name}: {each['differ']} of {each['logits']} logits with other bits, apart by at most "
            f"{each['largest']:.2g}; {each['outputs_differ']} of {each['outputs']} outputs differ"
        )


if __name__ == "__main__":
    run(main)
