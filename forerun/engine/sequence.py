"""A request, and the sequence that it becomes while it is decoded."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from forerun.failures import UNATTRIBUTABLE
from forerun.sampling.logprobs import Logprob, logprobs_of
from forerun.sampling.params import SamplingParams
from forerun.sampling.sampler import Sampler
from forerun.sampling.seeded import SeededSampler, SeededStream

Mode = Literal["greedy", "sampled"]


@dataclass(frozen=True)
class Request:
    """What is asked of an engine.

    Attributes:
        tokens: the prompt.
        max_new_tokens: the most tokens to generate.
        sampler: how a token follows from logits.
        eos: tokens that end the sequence.
        stop: asked after every token with all tokens so far; True ends the sequence
            (`forerun.text.stop_strings.StopStrings`).
        criteria: Hugging Face stopping criteria, asked after every token with ids [1, n] and the processed scores
            [1, V] that gave the token.
        seed: decides what is sampled: the same tokens by every method, beside any neighbours
            (`forerun.sampling.seeded`). None: the rule that accepts most drafts; what is sampled then depends on the
            method, and on when it drafts.
        stream: which stream of random numbers of the seed, for rows that share a seed. Streams of neighbouring seeds
            do not overlap.
        generator: source of random numbers without a seed. Default: one that begins where torch's own is.
        progress: called while the target reads the prompt, with the tokens read and how many there are.
        plain: decode without drafts, whatever the engine's method.
        logprobs: log probabilities of each token are wanted, with those of this many best ones in its place; None for
            none. They are of the target's own distribution, before processors and temperature.
        prompt_logprobs: those of the prompt are wanted too. Then all of it is run, whatever is known of it already.
        salt: keys and values, phrases and outputs are shared among requests of one salt only. Phrases and outputs of
            earlier requests are for those without one.
        params: what it was made of, so that it can be made again elsewhere (`forerun.scale`); the engine does not look.
    """

    tokens: abc.Sequence[int]
    max_new_tokens: int = 256
    sampler: Sampler = field(default_factory=Sampler)
    eos: frozenset[int] = frozenset()
    stop: Callable[[abc.Sequence[int]], bool] | None = None
    criteria: StoppingCriteriaList | None = None
    seed: int | None = None
    stream: int = 0
    generator: torch.Generator | None = None
    progress: Callable[[int, int], None] | None = None
    plain: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False
    salt: str = ""
    params: SamplingParams | None = None

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("a request needs at least one token")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")


class Sequence:
    """One sequence while it is decoded.

    Attributes:
        id: of the request, unique in its engine.
        tokens: prompt and output so far; grows.
        prompt_length: how many of them are the prompt.
        limit: total length at which it ends.
        seeded: what a sequence with a seed is sampled by, else None.
        generator: source of random numbers of this sequence alone; None if it needs none.
        finish_reason: None while it runs, then "stop" (end token, stop string or criterion), "length", "abort" or
            "error".
        error: what a user's processor or criterion raised, or a step of this sequence alone.
        suspect: whether it was part of a step that failed; until it has been stepped alone.
        waited: seconds in the queue; None while it is there.
        prompt_logprobs: of the prompt's tokens after the first, until its first step takes them.
    """

    def __init__(
        self,
        request: Request,
        id: int = 0,
        device: torch.device | str = "cpu",
        context: int | None = None,
    ) -> None:
        self.request, self.id = request, id
        self.tokens = list(request.tokens)
        self.prompt_length = len(self.tokens)
        self.limit = self.prompt_length + request.max_new_tokens
        if context:
            self.limit = max(min(self.limit, context), self.prompt_length + 1)
        self.sampler, self.eos = request.sampler, request.eos
        self.finish_reason: str | None = None
        self.asked = perf_counter()
        self.waited: float | None = None
        self.suspect = False
        self.prompt_logprobs: list[Logprob] | None = None
        self._error: BaseException | None = None
        self.seeded = (
            None if self.greedy or request.seed is None else SeededStream(int(request.seed), int(request.stream))
        )
        self.generator = None
        if not self.greedy and self.seeded is None:
            self.generator = request.generator or torch.Generator(device).manual_seed(int(torch.randint(2**62, (1,))))
        self._ids: Tensor | None = None  # the tokens again, for criteria

    @property
    def error(self) -> BaseException | None:
        return self._error

    @error.setter
    def error(self, error: BaseException) -> None:
        self._error, self.finish_reason = error, "error"

    @property
    def shares(self) -> bool:
        """Whether it drafts from what earlier sequences said, and others from what it says."""
        return not self.request.salt

    @property
    def greedy(self) -> bool:
        return self.sampler.greedy

    @property
    def mode(self) -> Mode:
        """How it is decoded."""
        return "greedy" if self.greedy else "sampled"

    def source(self, ahead: int) -> SeededSampler | torch.Generator | None:
        """What the token is sampled by that comes `ahead` tokens after the last."""
        return self.generator if self.seeded is None else self.seeded.at(len(self.tokens) + ahead)

    @property
    def remaining(self) -> int:
        """Tokens that may still come."""
        return self.limit - len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def extend(self, tokens: abc.Sequence[int], scores: Callable[[int], Tensor]) -> int:
        """Appends tokens up to the first that ends the sequence; returns how many.

        `scores(i)` gives the processed scores [V] after token i, for criteria. What a criterion raises ends the
        sequence with the reason "error".
        """
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            try:
                stopped = token in self.eos or self._stopped(scores, count - 1)
            except UNATTRIBUTABLE:
                raise
            except BaseException as error:
                self.error = error
                return count
            if stopped:
                self.finish_reason = "stop"
            elif not self.remaining:
                self.finish_reason = "length"
            if self.finish_reason:
                return count
        return len(tokens)

    def report(self, read: int) -> None:
        """Reports how much of the prompt was read, if the request asks for it. What is raised ends the sequence."""
        if self.request.progress is None:
            return
        try:
            self.request.progress(read, len(self.tokens))
        except Exception as error:
            self.error = error
            raise

    def score_prompt(self, logits: Tensor) -> None:
        """Adds the log probabilities of the prompt's next tokens, from the logits [n, V] that stand before them."""
        assert self.prompt_logprobs is not None
        at = 1 + len(self.prompt_logprobs)
        top = self.request.logprobs or 0
        self.prompt_logprobs += logprobs_of(logits, self.tokens[at : at + len(logits)], top)

    def cut(self, length: int, state: Tensor | None) -> None:
        """Takes back what came after the first `length` tokens, and sets the generator's state; it runs again."""
        del self.tokens[length:]
        if self.generator is not None and state is not None:
            self.generator.set_state(state)
        self._error = self.finish_reason = None

    def _stopped(self, scores: Callable[[int], Tensor], at: int) -> bool:
        if self.request.stop is not None and self.request.stop(self.tokens):
            return True
        if not self.request.criteria:
            return False
        found, count = scores(at)[None], len(self.tokens)
        if self._ids is None:
            self._ids = torch.empty(1, self.limit, dtype=torch.long, device=found.device)
            self._ids[0, :count] = torch.tensor(self.tokens)
        self._ids[0, count - 1] = self.tokens[-1]
        return bool(self.request.criteria(self._ids[:, :count], found).any())  # type: ignore[arg-type]
