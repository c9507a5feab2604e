"""`forerun try`: which method decodes a model fastest here, found in about two minutes.

Every method that can run decodes three prompts (`forerun.bench.trial_prompts`) greedily, round by
round. In a round the methods follow each other, and each is compared with plain decoding of the
same round, because a machine's speed drifts over minutes. A method's figure is the median over the
rounds. Methods that are far behind leave after a round, so that the time is spent on the others.

The numbers of rounds and tokens, and when a method leaves, are our own choices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

from forerun.api.choose import resolve, shipped
from forerun.bench.plan import Plan
from forerun.bench.trial_prompts import EDIT, EDIT_TOKENS, MIN_EDIT_TOKENS, TASKS, Task, encoded
from forerun.methods import AR, METHODS, Hybrid, Method
from forerun.methods import method as make_method
from forerun.sampling.params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forerun.model.causal_lm import CausalLM

PLAIN = AR.name
MAX_ANSWER = 128  # of an answer
MIN_ANSWER = 24
# An answer that the model ends before has so few steps that it says little: it goes on after its
# end token.
SHORT_ANSWER = 16
MAX_TRIAL_ROUNDS = 7
FIRST_ROUND_SHARE = 0.55  # of the time that is left when the first round begins
READING_SHARE = 0.25  # of all the time: for the target to read the long prompt once
METHOD_COST = 0.65  # what a method's answers are expected to take, of the time of plain ones
WARM_TOKENS = 12  # decoded plainly before anything is measured
PROBE_TOKENS = 192  # read to see how fast prompts are read
READ_CHUNK = 256
# How far behind the best a method may be and stay, after a first round, a second one, and so on.
# One round proves little on a busy machine, so a method leaves sooner only where time is short.
BEHIND = (0.4, 0.25, 0.1, 0.07)
BEHIND_IN_HASTE = (0.2, 0.1, 0.07)
HASTE_ROUNDS = 2.0  # time is short if it lasts for fewer rounds of all methods that are left
ENOUGH_ROUNDS = 5  # once plain decoding and one other method are left
# Of methods that differ by no more than this, the simplest is recommended. Figures of other prompts
# differ by more.
SAME_SPEED = 0.02
# The default method of a known target was chosen on far more prompts than three, so it is
# recommended unless another one is so much faster.
DEFAULT_MARGIN = 0.1
MIN_GAIN = 0.02  # with less, plain decoding is recommended
KEPT_BYTES = 2**32  # of keys and values of the prompts on disk, while a trial runs
OPEN_SHARE = 0.2  # of the free memory, for buffers of engines that stay open


@dataclass(frozen=True)
class Subject:
    """What is tried.

    Attributes:
        plan: the models, how they are loaded, and the methods, which include "ar".
        tokenizer: the target's, or None.
        seconds: about how long it may take, loading included.
        memory: free bytes, None if they are unknown.
    """

    plan: Plan
    tokenizer: PreTrainedTokenizerBase | None
    seconds: float
    memory: int | None = None


@dataclass(frozen=True)
class Answer:
    """What a method decoded for a task in one round.

    Attributes:
        tokens: the answer.
        seconds: of its steps, and of reading the prompt with the draft model if that was used.
            Reading with the target is left out, as it takes the same time with every method.
    """

    tokens: list[int]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """The decoded tokens per second."""
        return len(self.tokens) / max(self.seconds, 1e-9)


Round = dict[str, dict[str, Answer]]  # {method: {task: answer}}


@dataclass(frozen=True)
class Verdict:
    """The answers of a trial, and what follows from them.

    Attributes:
        methods: by their names, "ar" first.
        rounds: the answers. A method that has left is missing in later rounds.
        prompt_tokens: {task: tokens of its prompt}.
        exact: of the target (`forerun.model.causal_lm.CausalLM.exact`).
        seconds: how long it all took.
        default: the method that ships with the target, if one does.
    """

    methods: Mapping[str, Method]
    rounds: list[Round]
    prompt_tokens: dict[str, int]
    exact: str
    seconds: float
    default: str | None = None

    @cached_property
    def plain_speeds(self) -> dict[str, float]:
        """{task: tokens/s of plain decoding}, medians over the rounds."""
        speeds = {}
        for task in self.prompt_tokens:
            speeds[task] = median(answers[PLAIN][task].tokens_per_s for answers in self.rounds)
        return speeds

    @cached_property
    def gains(self) -> dict[str, dict[str, float]]:
        """{method: {task: times as fast as plain decoding}}, medians over its rounds."""
        return {name: gains_of(name, self.rounds) for name in self.methods}

    @cached_property
    def overall(self) -> dict[str, float]:
        """{method: times as fast as plain decoding}, the geometric mean over the tasks."""
        return {name: exp(score(gains)) for name, gains in self.gains.items()}

    @cached_property
    def differences(self) -> dict[str, tuple[str, int]]:
        """{method: the task and place where its answer first differs from plain decoding's}.

        Methods whose answers are all equal are missing.
        """
        places = {}
        for name in self.methods:
            place = _difference(name, self.rounds)
            if place is not None:
                places[name] = place
        return places

    @property
    def best(self) -> str:
        """The method to use.

        It is the default that ships with the target, unless another is clearly faster; else the
        simplest of those that are about as fast as the fastest. Only methods whose answers are
        equal count; "ar" if none gains.
        """
        equal = {name: gain for name, gain in self.overall.items() if name not in self.differences}
        fastest = max(equal.values())
        if fastest < 1 + MIN_GAIN:
            return PLAIN
        if equal.get(self.default or "", 0.0) >= fastest * (1 - DEFAULT_MARGIN):
            return str(self.default)
        close = [name for name, gain in equal.items() if gain >= fastest * (1 - SAME_SPEED)]
        return min(close, key=lambda name: (*_parts(self.methods[name]), -equal[name]))

    def best_of(self, task: str) -> str:
        """Return the fastest method for a task, among those whose answers are equal."""
        equal = [name for name in self.methods if name not in self.differences]
        return max(equal, key=lambda name: self.gains[name][task])

    def rounds_of(self, name: str) -> int:
        """Return how many rounds a method took part in."""
        return sum(name in answers for answers in self.rounds)

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {
            "best": self.best,
            "rounds": len(self.rounds),
            "seconds": round(self.seconds, 1),
            "prompt_tokens": self.prompt_tokens,
            "plain_tokens_per_s": {
                task: round(speed, 2) for task, speed in self.plain_speeds.items()
            },
            "methods": {name: self._row(name) for name in self.methods},
        }

    def _row(self, name: str) -> dict[str, Any]:
        return {
            "speedup": round(self.overall[name], 3),
            **{task: round(gain, 3) for task, gain in self.gains[name].items()},
            "equal": name not in self.differences,
            "rounds": self.rounds_of(name),
        }


def gains_of(name: str, rounds: list[Round]) -> dict[str, float]:
    """Return {task: times as fast as plain decoding}, medians over the rounds of a method."""
    ratios: dict[str, list[float]] = {}
    for answers in rounds:
        for task, answer in answers.get(name, {}).items():
            ratio = answer.tokens_per_s / answers[PLAIN][task].tokens_per_s
            ratios.setdefault(task, []).append(ratio)
    return {task: median(values) for task, values in ratios.items()}


def score(gains: Mapping[str, float]) -> float:
    """Return the mean logarithm of gains, in which each task counts alike."""
    return fmean(log(gain) for gain in gains.values())


def contenders(names: list[str], rounds: list[Round], is_in_haste: bool) -> list[str]:
    """Return the methods that go on to the next round: plain decoding and those close to the best.

    Plain decoding stays as the measure of the others.
    """
    scores = {name: score(gains_of(name, rounds)) for name in names}
    behind = BEHIND_IN_HASTE if is_in_haste else BEHIND
    allowed = behind[min(len(rounds), len(behind)) - 1]
    least = max(scores.values()) + log(1 - allowed)
    return [name for name in names if name == PLAIN or scores[name] >= least]


def _difference(name: str, rounds: list[Round]) -> tuple[str, int] | None:
    """Return the task and place of the first token that is not plain decoding's first answer."""
    for answers in rounds:
        for task, answer in answers.get(name, {}).items():
            plain = rounds[0][PLAIN][task].tokens
            if answer.tokens != plain:
                pairs = zip(answer.tokens, plain, strict=False)
                same = [ours == theirs for ours, theirs in pairs]
                return task, same.index(False) if False in same else len(same)
    return None


def _parts(method: Method) -> tuple[bool, bool]:
    """Return what a method needs, so that the simplest one comes first."""
    has_layer = method.head is not None or method.layer is not None
    return method.needs_draft, has_layer


def runnable(
    target: str,
    draft: str | None,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    trust_remote_code: bool = False,
) -> dict[str, Method]:
    """Return every method that can run on a target and its draft, "ar" first.

    Their settings are those that ship with the target, if any do. Loads no weights.

    Args:
        target: a known name, hub id, folder or GGUF file.
        draft: likewise, or None.
        tokenizer: the target's, or None.
        trust_remote_code: passed on to transformers.

    Raises:
        ValueError: the draft's tokenizer shares too few tokens with the target's.
    """
    from forerun.api.loading import translation_for

    is_translated = False
    if draft is not None and tokenizer is not None:
        translation = translation_for(tokenizer, draft, trust_remote_code=trust_remote_code)
        is_translated = translation is not None
    tuned = shipped(target, draft).get("greedy", {})
    chosen: dict[str, Method] = {PLAIN: AR()}
    for name in METHODS:
        given = make_method(name, **tuned.get(name, {}))
        try:
            method = resolve(target, draft, given).method
        except ValueError:  # it lacks a draft, layer or head
            continue
        if isinstance(method, Hybrid) and method.other == "auto":
            continue  # with no other drafter it is "suffix"
        if is_translated and not method.any_tokenizer:
            continue
        chosen[name] = method
    return chosen


Report = Callable[[str], None]  # gets a line on what begins


def run_trial(subject: Subject, report: Report = lambda line: None) -> Verdict:
    """Load the models, let every method decode the prompts, and return what came out.

    Raises ValueError if a model cannot be loaded.
    """
    with TemporaryDirectory(prefix="forerun-try-") as folder:
        return _Trial(subject, Path(folder), report).run()


@dataclass(frozen=True)
class _Size:
    """How much is decoded, so that it takes the time that there is.

    Attributes:
        prompts: {task: token ids}.
        tokens: of an answer.
        draft_seconds: {task: seconds that the draft model takes to read the prompt}.
    """

    prompts: dict[str, list[int]]
    tokens: int
    draft_seconds: dict[str, float]


@dataclass(frozen=True)
class _Clock:
    """The time that a trial may take."""

    limit: float
    started_at: float = field(default_factory=perf_counter)

    @property
    def elapsed(self) -> float:
        """The seconds since the trial began."""
        return perf_counter() - self.started_at

    @property
    def left(self) -> float:
        """The seconds that are left, at least one."""
        return max(1.0, self.limit - self.elapsed)


class _Trial:
    """The models and decoders of a trial."""

    def __init__(self, subject: Subject, folder: Path, report: Report) -> None:
        from forerun.bench.models import load_decoders

        self._clock = _Clock(subject.seconds)
        self._subject = subject
        self._report = report
        report("loading")
        loaded, self._target = load_decoders(subject.plan, subject.tokenizer)
        # The long prompt is read once and kept on disk. No answer helps a later one.
        kept: dict[str, Any] = {"share_outputs": False} | _kept_in(folder)
        self._decoders = {name: decoder.replace(**kept) for name, decoder in loaded.items()}
        self._draft = next((each.draft for each in self._decoders.values() if each.draft), None)
        self._forced: set[str] = set()  # tasks whose answers go on after their end token

    def run(self) -> Verdict:
        """Run the rounds, as many as the time allows."""
        size = self._size()
        names = self._order(list(self._decoders))
        rounds: list[Round] = []
        while len(rounds) < MAX_TRIAL_ROUNDS:
            started_at = perf_counter()
            rounds.append(self._round(names, size, len(rounds)))
            seconds = perf_counter() - started_at
            names = contenders(names, rounds, self._clock.left < HASTE_ROUNDS * seconds)
            is_decided = len(names) <= 2 and len(rounds) >= ENOUGH_ROUNDS
            share = len(names) / len(rounds[-1])
            if is_decided or seconds * share > self._clock.left:
                break
        plan = self._subject.plan
        return Verdict(
            {name: self._decoders[name].method for name in plan.methods},
            rounds,
            {task: len(prompt) for task, prompt in size.prompts.items()},
            self._target.exact,
            self._clock.elapsed,
            shipped(plan.target, plan.draft).get("default", {}).get("greedy"),
        )

    def _order(self, names: list[str]) -> list[str]:
        """Return methods with a head first.

        What they keep of a prompt serves all; what others keep lacks the hidden states.
        """
        return sorted(names, key=lambda name: self._decoders[name].head is None)

    def _round(self, names: list[str], size: _Size, number: int) -> Round:
        """Let methods decode all tasks, each round beginning with another one."""
        turn = number % len(names)
        answers: Round = {}
        for place, name in enumerate([*names[turn:], *names[:turn]], 1):
            self._report(f"round {number + 1}: {name}, {place} of {len(names)}")
            answers[name] = {
                task: self._answer(name, task, prompt, size)
                for task, prompt in size.prompts.items()
            }
            if not self._keeps_engines(len(self._decoders)):
                self._decoders[name].close()
        return answers

    def _keeps_engines(self, count: int) -> bool:
        """Return whether so many engines, each with a long text, are small beside the memory."""
        needed = count * self._target.position_bytes * (EDIT_TOKENS + MAX_ANSWER)
        return self._subject.memory is None or needed <= OPEN_SHARE * self._subject.memory

    def _answer(self, name: str, task: str, prompt: list[int], size: _Size) -> Answer:
        """Decode a task, once more if its answer is too short to measure."""
        answer = self._decoded(name, prompt, size.tokens, task in self._forced)
        if len(answer.tokens) < min(SHORT_ANSWER, size.tokens) and task not in self._forced:
            self._forced.add(task)
            answer = self._decoded(name, prompt, size.tokens, True)
        seconds = sum(step.seconds for step in answer.steps)
        if any(step.draft_forwards for step in answer.steps):
            seconds += size.draft_seconds[task]
        return Answer(answer.tokens, seconds)

    def _decoded(self, name: str, prompt: list[int], tokens: int, is_forced: bool) -> Any:
        """Return the completion of a prompt."""
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=is_forced)
        return self._decoders[name].generate(prompt, params)

    # How much is decoded.

    def _size(self) -> _Size:
        """Measure how fast the models are, and choose the length of prompts and answers.

        The context bounds both: half of it is for the answer at most.
        """
        context = self._target.context or EDIT_TOKENS + MAX_ANSWER
        most = max(1, min(MAX_ANSWER, context // 2 - 1))
        room = min(EDIT_TOKENS, context - most - 1)
        self._report("measuring how fast it is")
        plain_seconds = self._plain_seconds(min(WARM_TOKENS, most))
        token_seconds = self._reading_seconds(self._target, room)
        affordable = READING_SHARE * self._clock.limit / token_seconds
        room = min(room, max(MIN_EDIT_TOKENS, int(affordable)))
        prompts = {task.name: self._prompt(task, room) for task in TASKS}
        reading = token_seconds * len(prompts[EDIT.name])
        draft_seconds = dict.fromkeys(prompts, 0.0)
        if self._draft is not None:
            per_token = self._reading_seconds(self._draft, room)
            draft_seconds = {task: per_token * len(prompt) for task, prompt in prompts.items()}
            reading += draft_seconds[EDIT.name]
        left = FIRST_ROUND_SHARE * max(1.0, self._clock.left - reading)
        others = METHOD_COST * (len(self._decoders) - 1)
        tokens = int(left / (len(TASKS) * plain_seconds * (1 + others)))
        return _Size(prompts, min(most, max(MIN_ANSWER, tokens)), draft_seconds)

    def _prompt(self, task: Task, limit: int) -> list[int]:
        return encoded(task, self._subject.tokenizer, self._target.vocab_size, limit)

    def _plain_seconds(self, tokens: int) -> float:
        """Return the seconds of a token of plain decoding, after warming the machine up."""
        prompt = [token % self._target.vocab_size for token in range(1, 9)]
        steps = self._decoded(PLAIN, prompt, tokens, True).steps
        return max(1e-6, median(step.seconds for step in steps))

    def _reading_seconds(self, model: CausalLM, room: int) -> float:
        """Return the seconds per token in which a model reads a prompt of `room` tokens."""
        count = max(1, min(PROBE_TOKENS, room))
        tokens = [token % model.vocab_size for token in range(count)]
        started_at = perf_counter()
        for _ in model.fresh().prefill(tokens, READ_CHUNK):
            pass
        return (perf_counter() - started_at) / count


def _kept_in(folder: Path) -> dict[str, Any]:
    """Return the options that keep prompts in a folder; {} on a system that lacks its locks."""
    if find_spec("fcntl") is None:
        return {}
    return {"prompt_cache": folder, "prompt_cache_bytes": KEPT_BYTES}
