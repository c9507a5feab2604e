"""A request, and the sequence that it becomes while it is decoded."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from forerun.engine.recent_states import RecentStates
from forerun.failures import UNATTRIBUTABLE
from forerun.sampling.probabilities import Logprob, logprobs_of
from forerun.sampling.sampler import Sampler
from forerun.sampling.seeded import SeededSampler, SeededStream
from forerun.sampling.waits import short_waits

Mode = Literal["greedy", "sampled"]


class Phase(Enum):
    """Where a sequence stands in its engine."""

    WAITING = "waiting"  # in the queue
    PREFILLING = "prefilling"  # the models read its prompt
    RUNNING = "running"  # it has a row and is decoded
    LEAVING = "leaving"  # it has given up its row, and this has not been reported yet
    ENDED = "ended"  # its last step is in the outbox


class Checkpoint(NamedTuple):
    """What a step changes in a sequence, as it was before the step."""

    steps: int  # the number of steps that the engine had reported
    length: int  # in tokens
    random_state: Tensor | None  # of the sequence's generator, if it has one


@dataclass(frozen=True)
class Request:
    """A request to an engine.

    Without a seed, the engine uses the acceptance rule that accepts the most tokens. The sampled
    tokens then depend on the method and on when it drafts. The streams of neighbouring seeds do
    not overlap.

    Only requests with the same salt share keys and values. Only requests without a salt share
    phrases and earlier outputs.
    """

    tokens: abc.Sequence[int]  # the prompt
    max_new_tokens: int = 256
    sampler: Sampler = field(default_factory=Sampler)  # chooses tokens from logits
    eos: frozenset[int] = frozenset()  # tokens that end the sequence
    # Called after each token with all tokens so far; True ends the sequence. An example is
    # `forerun.text.stop_strings.StopStrings`.
    stop: Callable[[abc.Sequence[int]], bool] | None = None
    # Called after each token with the ids [1, n] and the processed scores [1, V] of that token.
    criteria: StoppingCriteriaList | None = None
    # The seed alone decides the sampled tokens, whatever the method (`forerun.sampling.seeded`).
    seed: int | None = None
    stream: int = 0  # separates rows that share a seed
    # Source of random numbers without a seed; None: a new generator, seeded by torch's global one.
    generator: torch.Generator | None = None
    # Called with the number of prompt tokens read so far, and with their total number.
    progress: Callable[[int, int], None] | None = None
    # Decode without drafts, whatever the engine's method. The engine sets this too, for a sequence
    # whose scores were NaN after a draft (`forerun.engine.verify.end_drafting_of_nan`).
    plain: bool = False
    # Number of most probable tokens whose log probabilities are returned with that of each output
    # token; None: none are returned. They come from the target's own distribution, before
    # processors and temperature.
    logprobs: int | None = None
    # Return log probabilities of the prompt too, which then runs without the prefix store.
    prompt_logprobs: bool = False
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("a request needs at least one token")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")


class Sequence:
    """One sequence while it is decoded.

    Attributes:
        id: the request's id, unique in its engine.
        tokens: prompt and output so far; it grows.
        prompt_length: number of prompt tokens.
        limit: total length at which the sequence ends.
        seeded: the source of random numbers if the request has a seed, else None.
        generator: the source of random numbers without a seed; None if none is needed.
        finish_reason: "stop" (end token, stop string or criterion), "length", "abort" or "error";
            None while it runs.
        error: what a user's processor or criterion raised, or a step that held this sequence alone.
        phase: where it stands in its engine.
        checkpoint: its state before the present step; None between steps.
        features: hidden states at its last tokens, to be saved with its keys and values; None if
            they are not saved.
        suspect: whether it was in a failed step and has not passed a step alone since.
        waited: seconds in the queue; None until it has left the queue once.
        rows: number of sequences that ran or waited when it left the queue, itself included.
        prompt_logprobs: log probabilities of the prompt's tokens after the first, until the first
            step reports them.
    """

    def __init__(
        self,
        request: Request,
        id: int = 0,
        device: torch.device | str = "cpu",
        context: int | None = None,
    ) -> None:
        self.request = request
        self.id = id
        self.tokens = list(request.tokens)
        self.prompt_length = len(self.tokens)
        self.limit = self.prompt_length + request.max_new_tokens
        if context:
            self.limit = max(min(self.limit, context), self.prompt_length + 1)
        self.sampler = request.sampler
        self.eos = request.eos
        self.finish_reason: str | None = None
        self.phase = Phase.WAITING
        self.checkpoint: Checkpoint | None = None
        self.features: RecentStates | None = None
        self.added_at = perf_counter()
        self.waited: float | None = None
        self.rows = 1
        self.suspect = False
        self.prompt_logprobs: list[Logprob] | None = None
        self.seeded: SeededStream | None = None
        self.generator: torch.Generator | None = None
        if not self.greedy and request.seed is not None:
            self.seeded = SeededStream(int(request.seed), int(request.stream))
        elif not self.greedy:
            self.generator = request.generator or _new_generator(device)
        self._error: BaseException | None = None
        self._criteria_ids: Tensor | None = None  # [1, limit] the tokens as criteria want them

    @property
    def error(self) -> BaseException | None:
        """Return the exception that ended the sequence. Setting it ends the sequence."""
        return self._error

    @error.setter
    def error(self, error: BaseException) -> None:
        self._error = error
        self.finish_reason = "error"

    @property
    def shares(self) -> bool:
        """Return whether others may draft from its output; those with a salt keep theirs."""
        return not self.request.cache_salt

    @property
    def greedy(self) -> bool:
        """Return whether the most probable token is always chosen."""
        return self.sampler.greedy

    def source(self, ahead: int) -> SeededSampler | torch.Generator | None:
        """Return the source of randomness of the token `ahead` places after the last."""
        if self.seeded is None:
            return self.generator
        return self.seeded.at(len(self.tokens) + ahead)

    @property
    def remaining(self) -> int:
        """Return the number of tokens that may still come."""
        return self.limit - len(self.tokens)

    @property
    def output(self) -> list[int]:
        """Return the tokens after the prompt."""
        return self.tokens[self.prompt_length :]

    def extend(self, tokens: abc.Sequence[int], scores: Callable[[int], Tensor]) -> int:
        """Append tokens up to the first that ends the sequence, and return how many.

        An exception of a criterion ends the sequence too, and is stored in `error`.

        Args:
            tokens: the committed tokens.
            scores: returns the processed scores [V] of `tokens[i]`; called only for criteria.
        """
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            try:
                stopped = token in self.eos or self._stopped(scores, count - 1)
                if not stopped and not self.remaining:
                    stopped = self._is_ended_at_last()
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

    def settle(self) -> None:
        """End the sequence if its rule, asked again, says that its last token has ended it.

        A rule of a constraint may not have known that when the token came.
        """
        if len(self.tokens) == self.prompt_length:
            return
        try:
            if self._is_ended_by_rule():
                self.finish_reason = "stop"
        except UNATTRIBUTABLE:
            raise
        except BaseException as error:
            self.error = error

    def _is_ended_by_rule(self) -> bool:
        return self.request.stop is not None and self.request.stop(self.tokens)

    def _is_ended_at_last(self) -> bool:
        """Ask a rule that may not know yet once more, because there is no next step to `settle` in.

        It gets a wait of its own, because others may have used the step's.
        """
        if self.sampler.constraint is None:
            return False
        with short_waits():
            return self._is_ended_by_rule()

    def report(self, read: int) -> None:
        """Call the request's `progress`, if any, with the number of prompt tokens read.

        If it raises, the sequence ends with that exception, and the exception propagates.
        """
        if self.request.progress is None:
            return
        try:
            self.request.progress(read, len(self.tokens))
        except Exception as error:
            self.error = error
            raise

    def score_prompt(self, logits: Tensor) -> None:
        """Add the log probabilities of the next prompt tokens, which logits [n, V] predict."""
        assert self.prompt_logprobs is not None
        start = 1 + len(self.prompt_logprobs)
        tokens = self.tokens[start : start + len(logits)]
        self.prompt_logprobs += logprobs_of(logits, tokens, self.request.logprobs or 0)

    def save_checkpoint(self, steps: int = 0) -> None:
        """Remember the present state, so that `restore` can undo a step.

        Args:
            steps: the number of steps that the engine has reported.
        """
        random_state = None if self.generator is None else self.generator.get_state()
        self.checkpoint = Checkpoint(steps, len(self.tokens), random_state)

    def restore(self) -> None:
        """Undo the present step, if any, so that it can run again."""
        if self.checkpoint is None:
            return
        del self.tokens[self.checkpoint.length :]
        if self.generator is not None and self.checkpoint.random_state is not None:
            self.generator.set_state(self.checkpoint.random_state)
        self.clear_error()
        self.checkpoint = None

    def clear_error(self) -> None:
        """Take back the end of the sequence, as if its last step had not raised."""
        self._error = None
        self.finish_reason = None

    def _stopped(self, scores: Callable[[int], Tensor], index: int) -> bool:
        """Return whether the last token, the step's token `index`, ends the sequence."""
        if self._is_ended_by_rule():
            return True
        if not self.request.criteria:
            return False
        token_scores = scores(index)[None]
        count = len(self.tokens)
        if self._criteria_ids is None:
            self._criteria_ids = torch.empty(
                1, self.limit, dtype=torch.long, device=token_scores.device
            )
            self._criteria_ids[0, :count] = torch.tensor(self.tokens)
        self._criteria_ids[0, count - 1] = self.tokens[-1]
        stops = self.request.criteria(self._criteria_ids[:, :count], token_scores)
        return bool(stops.any())


def _new_generator(device: torch.device | str) -> torch.Generator:
    """Return a generator whose seed comes from torch's global generator."""
    seed = int(torch.randint(2**62, (1,)))
    return torch.Generator(device).manual_seed(seed)
