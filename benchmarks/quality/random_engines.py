"""Engines that run by chance: all is drawn at random, but outputs must be right.

Drafters, lengths of drafts, pauses, requests that come and go, instruction sets and threads are
drawn. Greedy outputs must equal those of decoding one by one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.forward_bits import (
    ROW,
    THREADS,
    DifferenceError,
    some_parents,
    some_text,
    use,
)
from forerun.csrc.library import variants
from forerun.engine.draft import Draft
from forerun.engine.engine import Drafter, Engine, Proposal, Step
from forerun.engine.sequence import Request
from forerun.engine.sequence import Sequence as EngineSequence
from forerun.engine.step import RowOutcome
from forerun.engine.target import ChunkSize
from forerun.methods import Method, Parts
from forerun.model.causal_lm import CausalLM
from forerun.planning.guard import Guard, GuardedDrafter

PROMPTS = 24
LONGEST_PROMPT = 300  # tokens, at most
NEW_TOKENS = 40  # of an output, at most
REQUESTS = 30  # of one engine, at most
ROWS = 6  # of one engine, at most
PREFIX_BYTES = 50_000_000

Answers = dict[tuple[int, ...], list[int]]  # outputs of decoding one by one, by prompts


@dataclass
class Counts:
    """What ran, in all engines together.

    Attributes:
        pauses: steps in which a guard left drafts out.
    """

    engines: int = 0
    outputs: int = 0
    aborted: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    pauses: int = 0


class Clock:
    """A clock that advances by chance, so that a guard pauses and tries again by chance."""

    def __init__(self, numbers: random.Random) -> None:
        self.numbers = numbers
        self.now = 0.0

    def __call__(self) -> float:
        self.now += self.numbers.choice((0.0001, 0.001, 0.001, 0.01))
        return self.now


@dataclass(frozen=True)
class ChanceMemo:
    """The drafter that was drawn for each sequence of a step, and the memos of all drafters."""

    chosen: dict[int, Drafter | None]
    inner: list[Any]


class RandomDrafter(Drafter):
    """Drafts each sequence, anew in each step, with one of several drafters or with a made-up one.

    A made-up draft knows the right output in part.
    """

    def __init__(
        self, drafters: Sequence[Drafter], answers: Answers, vocabulary: int, numbers: random.Random
    ) -> None:
        self.drafters = list(drafters)
        self.answers = answers
        self.vocabulary = vocabulary
        self.numbers = numbers
        wanted = [drafter.wants_hidden for drafter in drafters if drafter.wants_hidden]
        self.wants_hidden = wanted[0] if wanted else ""
        self.extra_nodes = max((drafter.extra_nodes for drafter in drafters), default=0)
        self._most_nodes = numbers.choice((2, 8, 24))
        self._knowledge = numbers.random()  # probability that a made-up token is right

    def admit(self, seq: EngineSequence, hidden: Tensor | None, chunk: ChunkSize) -> Any:
        for drafter in self.drafters:
            yield from drafter.admit(seq, hidden if drafter.wants_hidden else None, chunk)

    def propose(self, seqs: list[EngineSequence]) -> Proposal:
        chosen = {seq.id: self.numbers.choice([None, *self.drafters]) for seq in seqs}
        drafts: dict[int, Draft] = {}
        proposals: list[Proposal] = []
        for drafter in self.drafters:
            asked = [seq for seq in seqs if chosen[seq.id] is drafter]
            proposal = drafter.propose(asked) if asked else Proposal([])
            drafts |= zip([seq.id for seq in asked], proposal.drafts, strict=True)
            proposals.append(proposal)
        memo = ChanceMemo(chosen, [proposal.memo for proposal in proposals])
        rows = [drafts.get(seq.id) or self._made_up(seq) for seq in seqs]
        return Proposal.together(rows, proposals, memo)

    def observe(self, outcomes: Sequence[RowOutcome], memo: ChanceMemo | None) -> None:
        chosen = memo.chosen if memo is not None else {}
        for number, drafter in enumerate(self.drafters):
            # Hidden states come only once, so a drafter that wants them observes all drafts.
            rows = [
                outcome if drafter.wants_hidden else replace(outcome, hidden=None)
                for outcome in outcomes
                if drafter.wants_hidden or chosen.get(outcome.sequence.id) is drafter
            ]
            if rows:
                drafter.observe(rows, memo.inner[number] if memo is not None else None)

    def drop(self, seq: EngineSequence) -> None:
        for drafter in self.drafters:
            drafter.drop(seq)

    def _made_up(self, seq: EngineSequence) -> Draft:
        numbers = self.numbers
        sizes = (1, 1 + numbers.randrange(self._most_nodes), 1 + numbers.randrange(16))
        size = numbers.choice(sizes)
        if numbers.random() < 0.5:
            parents = some_parents(size, numbers)
        else:
            parents = list(range(-1, size - 1))
        right = self.answers[tuple(seq.request.tokens)][len(seq.output) :]
        tokens = [seq.tokens[-1]]
        for depth in Draft([0] * size, parents).depths[1:]:
            knows = depth <= len(right) and numbers.random() < self._knowledge
            tokens.append(right[depth - 1] if knows else numbers.randrange(self.vocabulary))
        return without_twins(tokens, parents)


def without_twins(tokens: Sequence[int], parents: Sequence[int]) -> Draft:
    """Return the tree without nodes that repeat a sibling's token, and without their subtrees."""
    kept_tokens: list[int] = []
    kept_parents: list[int] = []
    places: dict[int, int] = {}  # of kept nodes
    seen: set[tuple[int, int]] = set()
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if node and (parent not in places or (parent, token) in seen):
            continue
        seen.add((parent, token))
        places[node] = len(kept_tokens)
        kept_tokens.append(token)
        kept_parents.append(places[parent] if node else -1)
    return Draft(kept_tokens, kept_parents)


@torch.inference_mode()
def one_by_one(model: CausalLM, prompt: Sequence[int], new: int) -> list[int]:
    """Return the greedy output of forwards of one token, after a prompt that is read at once."""
    model.reset()
    model.add(ROW, len(prompt) + new)
    (logits,) = model.extend([ROW], [prompt])
    output = [int(logits[-1].argmax())]
    while len(output) < new:
        (logits,) = model.extend([ROW], [[output[-1]]])
        output.append(int(logits[-1].argmax()))
    return output


def answers_of(model: CausalLM, seed: int) -> Answers:
    """Return prompts with their outputs.

    Some prompts begin as others do, because the engine keeps prefixes.
    """
    numbers = random.Random(seed)
    text = some_text(4 * LONGEST_PROMPT, model.vocab_size, seed)
    use("", 1)
    answers: Answers = {}
    while len(answers) < PROMPTS:
        start = numbers.choice((0, 0, numbers.randrange(3 * LONGEST_PROMPT)))
        prompt = text[start : start + numbers.randint(1, LONGEST_PROMPT)]
        answers[tuple(prompt)] = one_by_one(model.fresh(), prompt, NEW_TOKENS)
    return answers


@dataclass(frozen=True)
class EngineCases:
    """What engines run by chance with.

    Attributes:
        parts: the target, and what drafts for it.
        methods: those from which each engine draws its drafters.
        answers: prompts, with their right outputs.
        kernels: instruction sets from which each step draws one.
    """

    parts: Parts
    methods: Sequence[Method]
    answers: Answers
    kernels: Sequence[str]


def run_by_chance(
    parts: Parts,
    methods: Sequence[Method],
    outputs: int,
    seed: int = 0,
    *,
    first: int = 0,
    kernels: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Counts:
    """Run engines until there are so many outputs, and return what ran.

    The seed and an engine's number decide all but what the models' own clocks decide.

    Args:
        parts: the target, and what drafts for it.
        methods: those from which each engine draws its drafters.
        outputs: how many.
        seed: of all random numbers.
        first: the number of the first engine.
        kernels: instruction sets from which each step draws one; all by default.
        say: gets a line of progress after each engine.

    Raises:
        DifferenceError: an output is not that of decoding one by one.
    """
    answers = answers_of(parts.target, seed)
    cases = EngineCases(parts, methods, answers, kernels or variants())
    counts = Counts(engines=first)
    say(f"{len(answers)} prompts were answered one by one")
    while counts.outputs < outputs:
        run_engine(cases, random.Random(f"{seed} {counts.engines}"), counts)
        say(
            f"{counts.outputs} of {outputs} outputs, {counts.drafted} tokens drafted, "
            f"{counts.accepted} accepted"
        )
    return counts


def run_engine(cases: EngineCases, numbers: random.Random, counts: Counts) -> None:
    """Run one engine with requests that come and go. Raises DifferenceError."""
    parts = cases.parts
    chosen = numbers.sample(list(cases.methods), numbers.randint(0, min(3, len(cases.methods))))
    drafters = [_built(method, parts) for method in chosen]
    drafter: Drafter = RandomDrafter(drafters, cases.answers, parts.target.vocab_size, numbers)
    if numbers.random() < 0.7:
        clock = Clock(numbers)
        drafter = GuardedDrafter(drafter, Guard(clock), Guard(clock))
    engine = Engine(
        parts.target.fresh(numbers.choice((0, PREFIX_BYTES))),
        drafter,
        max_rows=numbers.randint(1, ROWS),
        chunk_seconds=numbers.choice((1e-6, 0.01, 0.1)),
    )
    count = numbers.randint(4, REQUESTS)
    requests = [_some_request(cases.answers, numbers) for _ in range(count)]
    steps = _served(engine, requests, cases.kernels, numbers)
    counts.engines += 1
    names = [method.name for method in chosen]
    for request, own_steps in zip(requests, steps, strict=True):
        _compare(request, own_steps, cases.answers, names, counts)


def _served(
    engine: Engine, requests: list[Request], kernels: Sequence[str], numbers: random.Random
) -> list[list[Step]]:
    """Return the steps of each request; requests come in turns by chance, and some are aborted."""
    arrivals = [numbers.randrange(30) for _ in requests]
    aborts = {
        place: numbers.randrange(8) for place in range(len(requests)) if numbers.random() < 0.1
    }
    steps: dict[int, list[Step]] = {}
    ids: dict[int, int] = {}
    turn = 0
    while len(ids) < len(requests) or engine.busy:
        for place, arrival in enumerate(arrivals):
            if place not in ids and arrival <= turn:
                ids[place] = engine.add(requests[place])
        for place, after in aborts.items():
            if place in ids and len(steps.get(ids[place], ())) == after:
                engine.abort(ids[place])
        use(numbers.choice(kernels), numbers.randint(1, THREADS))
        for step in engine.step():
            steps.setdefault(step.id, []).append(step)
        turn += 1
    return [steps[ids[place]] for place in range(len(requests))]


def _built(method: Method, parts: Parts) -> Drafter:
    draft = parts.draft.fresh() if parts.draft is not None else None
    return method.build(replace(parts, draft=draft, pools={}))


def _some_request(answers: Answers, numbers: random.Random) -> Request:
    prompt = numbers.choice(list(answers))
    ends = numbers.sample(answers[prompt], numbers.choice((0, 0, 1)))
    return Request(list(prompt), numbers.randint(1, NEW_TOKENS), eos=frozenset(ends))


def _compare(
    request: Request, steps: list[Step], answers: Answers, methods: list[str], counts: Counts
) -> None:
    """Compare an output with decoding one by one, and count it. Raises DifferenceError."""
    output = [token for step in steps for token in step.tokens]
    reason = steps[-1].finish_reason
    wanted = _wanted(request, answers)
    if reason == "abort":
        wanted = wanted[: len(output)]
    if output != wanted or reason == "error":
        shown = [
            (step.number, step.rows, step.drafted, step.accepted, step.tokens, step.origins)
            for step in steps
        ]
        raise DifferenceError(
            f"an output of engine {counts.engines - 1} is not that of decoding one by one; it "
            f"ended by {reason}\n"
            f"drafters {methods}, prompt {list(request.tokens)}, ends {sorted(request.eos)}\n"
            f"found {output}\nwanted {wanted}\n"
            f"steps (number, rows, drafted, accepted, tokens, origins) {shown}"
        ) from steps[-1].error
    counts.outputs += 1
    counts.aborted += reason == "abort"
    counts.tokens += len(output)
    counts.drafted += sum(step.drafted for step in steps)
    counts.accepted += sum(step.accepted for step in steps)
    counts.pauses += sum(step.rests for step in steps)


def _wanted(request: Request, answers: Answers) -> list[int]:
    """Return the output of decoding one by one, up to the end token or the most tokens."""
    answer = answers[tuple(request.tokens)][: request.max_new_tokens]
    for place, token in enumerate(answer, 1):
        if token in request.eos:
            return answer[:place]
    return answer
