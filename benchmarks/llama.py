"""llama.cpp as a method among the others, through llama-cpp-python, on the file that our target was read from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.hf import end_tokens
from benchmarks.peers import is_llama, peer_settings
from forerun.backends.gguf import find
from forerun.bench.runners import Loaded, Outcome, Run
from forerun.sampling.params import SamplingParams
from forerun.zoo import locate

STEP = 256  # what its context's size is a multiple of


class Drafts:
    """Its prompt lookup, which counts how often it was asked: once before each forward behind the prompt's."""

    def __init__(self, lookup: Any) -> None:
        self.lookup, self.calls = lookup, 0

    def __call__(self, tokens: Any, **options: Any) -> Any:
        self.calls += 1
        return self.lookup(tokens, **options)


class LlamaCpp:
    """One file, decoded by llama.cpp with so many threads, in a context of at least `length` tokens.

    There are two models at most, one for plain decoding and one for all lookups. llama-cpp-python keeps the logits of
    every token where it drafts, the prompt's too, and fixes that when a model is made. It takes the room for these
    logits from the context's size, so that the context is as small as it can be.
    """

    def __init__(self, path: Path, params: SamplingParams, ends: set[int], length: int, threads: int) -> None:
        self.path, self.params, self.ends, self.length, self.threads = path, params, ends, length, threads
        self.models: dict[bool, Any] = {}

    def run(self, name: str) -> Run:
        """The method of that name. Raises ValueError where llama.cpp cannot read the file."""
        settings = peer_settings(name)
        drafts = None
        if settings:
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            drafts = Drafts(LlamaPromptLookupDecoding(**settings))
        model = self._model(drafts is not None)

        def run(prompts: Sequence[Sequence[int]], seeds: Sequence[int], warm_up: int | None = None) -> Outcome:
            if drafts is not None:
                drafts.calls, model.draft_model = 0, drafts
            begun = perf_counter()
            length = warm_up or self.params.max_new_tokens
            rows = [self._generate(model, *row, length) for row in zip(prompts, seeds, strict=True)]
            seconds = perf_counter() - begun
            # The prompt's forward gives a token and is counted, as with transformers.
            forwards = sum(map(len, rows)) if drafts is None else len(rows) + drafts.calls
            return Outcome(rows, seconds, forwards, 0)

        return run

    def _model(self, drafts: bool) -> Any:
        if drafts not in self.models:
            from llama_cpp import Llama

            try:
                self.models[drafts] = Llama(
                    str(self.path),
                    n_ctx=-(-self.length // STEP) * STEP,
                    n_threads=self.threads,
                    n_threads_batch=self.threads,
                    logits_all=drafts,
                    verbose=False,
                )
            except ValueError as error:
                raise ValueError(f"llama.cpp cannot load {self.path.name}: {error}") from None
        return self.models[drafts]

    def _generate(self, model: Any, prompt: Sequence[int], seed: int, length: int) -> list[int]:
        # It would go on from what it remembers of the call before, where the prompts begin alike, or are one prompt in
        # another round. Our decoders keep no prefixes in a bench and transformers keeps none, so it starts anew.
        model.reset()
        model.set_seed(seed % (2**32 - 1))  # the largest number of 32 bits asks for a random seed
        tokens = model.generate(
            list(prompt),
            temp=self.params.temperature,  # 0 takes the argmax, whatever the rest is
            top_k=0,
            top_p=self.params.top_p,
            min_p=0.0,
            typical_p=1.0,
            repeat_penalty=1.0,
        )
        with closing(tokens):
            return list(self._until_end(islice(tokens, length)))

    def _until_end(self, tokens: Iterator[int]) -> Iterator[int]:
        for token in tokens:
            yield token
            if token in self.ends:
                return


def load_llama(loaded: Loaded) -> LlamaCpp:
    """llama.cpp for all methods of its kind, with as many threads as torch has.

    Raises ValueError where our target is not on the CPU.
    """
    plan, target = loaded.plan, loaded.target
    names = [name for name in plan.methods if is_llama(name)]
    if target.device.type != "cpu":
        raise ValueError(f"method {names[0]!r} runs on the CPU and the target on {target.device}: give --device cpu")
    path = find(locate(plan.target, "target"))
    assert path is not None  # the plan was checked
    drafted = max(peer_settings(name).get("num_pred_tokens", 0) for name in names)
    longest = max(len(prompt.tokens or ()) for prompts in loaded.datasets.values() for prompt in prompts)
    length = longest + plan.max_new_tokens + drafted
    return LlamaCpp(path, plan.params(), end_tokens(target.model, plan.params()), length, torch.get_num_threads())
