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
from forerun.sampling.probabilities import Logprob, logprobs_of
from forerun.sampling.sampler import Sampler
from forerun.sampling.seeded import SeededSampler, SeededStream

Mode = Literal["greedy", "sampled"]


@dataclass(frozen=True)
class Request:
    """A request to an engine.

    Without a seed the acceptance rule that accepts most is used; then the sampled tokens depend on the method and on
    when it drafts. Streams of neighbouring seeds do not overlap.

    Requests share keys and values only within one salt. Only requests without a salt share phrases and earlier outputs.
    """

    tokens: abc.Sequence[int]  # the prompt
    max_new_tokens: int = 256
    sampler: Sampler = field(default_factory=Sampler)  # chooses tokens from logits
    eos: frozenset[int] = frozenset()  # tokens that end the sequence
    # Called after each token with all tokens so far; True ends the sequence (`forerun.text.stop_strings.StopStrings`).
    stop: Callable[[abc.Sequence[int]], bool] | None = None
    # Called after each token with ids [1, n] and the processed scores [1, V] that gave the token.
    criteria: StoppingCriteriaList | None = None
    seed: int | None = None  # decides sampled tokens, with every method (`forerun.sampling.seeded`)
    stream: int = 0  # separates rows that share a seed
    generator: torch.Generator | None = (
        None  # of random numbers without a seed; None: one seeded by torch's own
    )
    progress: Callable[[int, int], None] | None = (
        None  # called with prompt tokens read so far and in all
    )
    plain: bool = False  # decode without drafts, whatever the engine's method
    # Number of most probable tokens whose log-probabilities are returned with each token's own; None: none are. They
    # are of the target's own distribution, before processors and temperature.
    logprobs: int | None = None
    prompt_logprobs: bool = (
        False  # those of the prompt too, which then runs without the prefix store
    )
    salt: str = ""

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
        prompt_length: number of prompt tokens.
        limit: total length at which it ends.
        seeded: the source of a sequence with a seed, else None.
        generator: source of this sequence's random numbers; None if it needs none.
        finish_reason: "stop" (end token, stop string or criterion), "length", "abort" or "error"; None while it runs.
        error: what a user's processor or criterion raised, or a step of this sequence alone.
        suspect: whether it was in a failed step and has not been stepped alone since.
        waited: seconds in the queue; None while it is there.
        rows: number of sequences that ran or waited when it left the queue, itself included.
        prompt_logprobs: of the prompt's tokens after the first, until the first step takes them.
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
        self.rows = 1
        self.suspect = False
        self.prompt_logprobs: list[Logprob] | None = None
        self._error: BaseException | None = None
        is_seeded = not self.greedy and request.seed is not None
        self.seeded = (
            SeededStream(int(request.seed or 0), int(request.stream)) if is_seeded else None
        )
        self.generator = None
        if not self.greedy and self.seeded is None:
            self.generator = request.generator or torch.Generator(device).manual_seed(
                int(torch.randint(2**62, (1,)))
            )
        self._ids: Tensor | None = None  # the tokens as a tensor, for criteria

    @property
    def error(self) -> BaseException | None:
        return self._error

    @error.setter
    def error(self, error: BaseException) -> None:
        self._error, self.finish_reason = error, "error"

    @property
    def shares(self) -> bool:
        """Return whether it shares outputs to draft from, as sequences without a salt do."""
        return not self.request.salt

    @property
    def greedy(self) -> bool:
        return self.sampler.greedy

    def source(self, ahead: int) -> SeededSampler | torch.Generator | None:
        """Return the source of randomness of the token `ahead` places after the last."""
        return self.generator if self.seeded is None else self.seeded.at(len(self.tokens) + ahead)

    @property
    def remaining(self) -> int:
        """Return the number of tokens that may still come."""
        return self.limit - len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def extend(self, tokens: abc.Sequence[int], scores: Callable[[int], Tensor]) -> int:
        """Append tokens up to the first that ends the sequence; return how many. An exception of a criterion ends it
        too.

        `scores(i)` returns the processed scores [V] of token i, for criteria."""
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
        """Call the request's `progress`, if any, with the tokens read. An exception of it ends the sequence."""
        if self.request.progress is None:
            return
        try:
            self.request.progress(read, len(self.tokens))
        except Exception as error:
            self.error = error
            raise

    def score_prompt(self, logits: Tensor) -> None:
        """Add the log probabilities of the prompt's next tokens, from the logits [n, V] that predict them."""
        assert self.prompt_logprobs is not None
        at = 1 + len(self.prompt_logprobs)
        top = self.request.logprobs or 0
        self.prompt_logprobs += logprobs_of(logits, self.tokens[at : at + len(logits)], top)

    def cut(self, length: int, state: Tensor | None) -> None:
        """Remove all but the first `length` tokens and restore the generator's state, to run again."""
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
