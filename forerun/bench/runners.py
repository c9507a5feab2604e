"""What can be measured, under one interface: prompts in, tokens and what they cost out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from transformers import PreTrainedTokenizerBase

from forerun.api.load import Decoder
from forerun.bench.datasets import Prompt
from forerun.bench.plan import Plan
from forerun.engine.engine import Step
from forerun.engine.stats import Stats, summarise
from forerun.model.causal_lm import CausalLM
from forerun.sampling.params import SamplingParams


@dataclass(frozen=True)
class Outcome:
    """What one batch of prompts gave.

    Attributes:
        tokens: output token ids of each row.
        seconds: wall time of the call, prefill included.
        target_forwards, draft_forwards: counted once for each row that took part. Transformers' first forward is the
            prefill and gives a token; our prefill gives none and is not counted.
        steps: of each row; None where the method keeps no record.
        pads: whether the target's forwards run as many tokens of each row as the widest one has.
    """

    tokens: list[list[int]]
    seconds: float
    target_forwards: int
    draft_forwards: int
    steps: list[list[Step]] | None = None
    pads: bool = True

    @property
    def stats(self) -> Stats:
        if self.steps is not None:
            return summarise([step for row in self.steps for step in row], self.seconds)
        count = sum(map(len, self.tokens))
        return Stats(count, self.target_forwards, self.draft_forwards, 0, 0, 0, self.seconds, (), ())


# Prompts, a seed for each, and a length for the warm-up, which leaves no state behind but what a guard has measured.
Run = Callable[[Sequence[Sequence[int]], Sequence[int], int | None], Outcome]


@dataclass(frozen=True)
class Loaded:
    """What a `Runner` is made of: the plan, its prompts as token ids, the target's tokenizer, where one was needed, and
    the target that our methods decode with."""

    plan: Plan
    datasets: dict[str, list[Prompt]]
    tokenizer: PreTrainedTokenizerBase | None
    target: CausalLM


def forget_phrases(decoder: Decoder) -> None:
    """Empties the decoder's pools, which would know the output of a prompt that comes again."""
    for pool in (decoder.pools or {}).values():
        pool.clear()


def decoder_run(decoder: Decoder, params: SamplingParams, close: bool = False) -> Run:
    """A method of ours. Each row has a seed of its own, so it does not matter which rows are its neighbours. `close`
    frees the decoder's buffers after each call, for who has many decoders.

    Phrases of earlier prompts stay, but a prompt that comes again finds none.
    """
    seen: set[tuple[int, ...]] = set()

    def run(prompts: Sequence[Sequence[int]], seeds: Sequence[int], warm_up: int | None = None) -> Outcome:
        now = set(map(tuple, prompts))
        if now & seen:
            forget_phrases(decoder)
            seen.clear()
        seen.update(now)
        length, session = warm_up or params.max_new_tokens, decoder.session
        begun = perf_counter()
        requests = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            request = decoder.request(list(prompt), replace(params, seed=None, max_new_tokens=length))
            # Most requests have no seed, so it is their acceptance rule that is measured.
            numbers = None if params.temperature == 0 else torch.Generator(decoder.target.device).manual_seed(seed)
            requests.append(replace(request, generator=numbers))
        rows = session.add(requests).collect()
        seconds = perf_counter() - begun
        if close:
            decoder.close()
        return Outcome(
            tokens=[[token for step in row for token in step.tokens] for row in rows],
            seconds=seconds,
            target_forwards=sum(map(len, rows)),
            draft_forwards=sum(step.draft_forwards for row in rows for step in row),
            steps=rows,
            pads=decoder.target.pads,
        )

    return run
