"""An engine in which everything is left to chance but the outputs: drafters, lengths of drafts, pauses, who comes and
goes, instruction sets and threads. Greedy outputs must be those of decoding one by one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.forward_bits import ROW, THREADS, Difference, some_parents, some_text, use
from forerun.csrc.library import variants
from forerun.engine.draft import Draft
from forerun.engine.engine import Drafter, Engine, Proposal, Step
from forerun.engine.sequence import Request
from forerun.engine.sequence import Sequence as EngineSequence
from forerun.engine.step import RowOutcome
from forerun.methods import Method, Parts
from forerun.model.causal_lm import CausalLM
from forerun.planning.guard import Guard, GuardedDrafter

PROMPTS, LONGEST, NEW = 24, 300, 40  # prompts, their tokens and those of an output at most
SESSIONS = 30  # the most requests of one engine
PREFIX_BYTES = 50_000_000
Answers = dict[tuple[int, ...], list[int]]


@dataclass
class Counts:
    """What was run. Each field is a number of all engines together."""

    engines: int = 0
    outputs: int = 0
    aborted: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    pauses: int = 0  # steps in which a guard left drafts out


class Clock:
    """Seconds that pass by chance, so that a guard pauses and tries again by chance."""

    def __init__(self, numbers: random.Random) -> None:
        self.numbers, self.now = numbers, 0.0

    def __call__(self) -> float:
        self.now += self.numbers.choice((0.0001, 0.001, 0.001, 0.01))
        return self.now


@dataclass(frozen=True)
class ChanceMemo:
    """What was chosen for each sequence of a step, and the memos of all drafters."""

    chosen: dict[int, Drafter | None]
    inner: list[Any]


class Chances(Drafter):
    """Each sequence's draft comes from one of several drafters, or from none, or is made up: by chance, anew in each
    step. What is made up knows the answer in part."""

    def __init__(
        self, drafters: Sequence[Drafter], answers: Answers, vocabulary: int, numbers: random.Random
    ) -> None:
        self.drafters, self.answers, self.vocabulary, self.numbers = (
            list(drafters),
            answers,
            vocabulary,
            numbers,
        )
        self.wants_hidden = next((each.wants_hidden for each in drafters if each.wants_hidden), "")
        self.spread = max((each.spread for each in drafters), default=0)
        self._depth, self._deep = numbers.choice((2, 8, 24)), numbers.random()

    def admit(self, seq: EngineSequence, hidden: Tensor | None, chunk: int) -> Any:
        for drafter in self.drafters:
            yield from drafter.admit(seq, hidden if drafter.wants_hidden else None, chunk)

    def propose(self, seqs: list[EngineSequence]) -> Proposal:
        chosen = {seq.id: self.numbers.choice([None, *self.drafters]) for seq in seqs}
        drafts, proposals, memos = dict[int, Draft](), list[Proposal](), list[Any]()
        for drafter in self.drafters:
            asked = [seq for seq in seqs if chosen[seq.id] is drafter]
            proposal = drafter.propose(asked) if asked else Proposal([])
            drafts |= zip([seq.id for seq in asked], proposal.drafts, strict=True)
            proposals.append(proposal)
            memos.append(proposal.memo)
        return Proposal.together(
            [drafts.get(seq.id) or self._made_up(seq) for seq in seqs],
            proposals,
            ChanceMemo(chosen, memos),
        )

    def observe(self, outcomes: Sequence[RowOutcome], memo: ChanceMemo | None) -> None:
        chosen = memo.chosen if memo is not None else {}
        for number, drafter in enumerate(self.drafters):
            # Hidden states come only once, so what wants them observes the drafts of others too.
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
        size = self.numbers.choice(
            (1, 1 + self.numbers.randrange(self._depth), 1 + self.numbers.randrange(16))
        )
        parents = (
            some_parents(size, self.numbers)
            if self.numbers.random() < 0.5
            else list(range(-1, size - 1))
        )
        draft, right = (
            Draft([0] * size, parents),
            self.answers[tuple(seq.request.tokens)][len(seq.output) :],
        )
        tokens = [seq.tokens[-1]]
        for depth in draft.depths[1:]:
            knows = depth <= len(right) and self.numbers.random() < self._deep
            tokens.append(right[depth - 1] if knows else self.numbers.randrange(self.vocabulary))
        return without_twins(tokens, parents)


def without_twins(tokens: Sequence[int], parents: Sequence[int]) -> Draft:
    """Return the tree without nodes that have the token of an earlier sibling, and without what is below them."""
    place, kept_tokens, kept_parents = dict[int, int](), list[int](), list[int]()
    seen = set[tuple[int, int]]()
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if node and (parent not in place or (parent, token) in seen):
            continue
        seen.add((parent, token))
        place[node] = len(kept_tokens)
        kept_tokens.append(token)
        kept_parents.append(place[parent] if node else -1)
    return Draft(kept_tokens, kept_parents)


@torch.inference_mode()
def one_by_one(model: CausalLM, prompt: Sequence[int], new: int) -> list[int]:
    """Return the greedy output of forwards of one token behind a prompt that is read at once."""
    model.reset()
    model.add(ROW, len(prompt) + new)
    (logits,) = model.extend([ROW], [prompt])
    found = [int(logits[-1].argmax())]
    while len(found) < new:
        (logits,) = model.extend([ROW], [[found[-1]]])
        found.append(int(logits[-1].argmax()))
    return found


def answers_of(model: CausalLM, seed: int, longest: int = LONGEST) -> Answers:
    """Return prompts with their outputs. Some prompts begin as others do, because prefixes are kept."""
    numbers, text = random.Random(seed), some_text(4 * longest, model.vocab_size, seed)
    use("", 1)
    found: Answers = {}
    while len(found) < PROMPTS:
        start = numbers.choice((0, 0, numbers.randrange(3 * longest)))
        prompt = text[start : start + numbers.randint(1, longest)]
        found[tuple(prompt)] = one_by_one(model.fresh(), prompt, NEW)
    return found


def run_by_chance(
    parts: Parts,
    methods: Sequence[Method],
    outputs: int,
    seed: int = 0,
    *,
    first: int = 0,
    of_variants: Sequence[str] | None = None,
    longest: int = LONGEST,
    say: Callable[[str], None] = lambda line: None,
) -> Counts:
    """Run engines, from the number `first` on, until there are so many outputs. Raises Difference for one that is not
    decoding's one by one. The seed and an engine's number decide all but what the models' own clocks decide."""
    answers, counts = answers_of(parts.target, seed, longest), Counts(engines=first)
    say(f"{len(answers)} prompts were answered one by one")
    while counts.outputs < outputs:
        numbers = random.Random(f"{seed} {counts.engines}")
        run_engine(parts, methods, answers, of_variants or variants(), numbers, counts)
        say(
            f"{counts.outputs} of {outputs} outputs, {counts.drafted} tokens drafted, {counts.accepted} accepted"
        )
    return counts


def run_engine(
    parts: Parts,
    methods: Sequence[Method],
    answers: Answers,
    of_variants: Sequence[str],
    numbers: random.Random,
    counts: Counts,
) -> None:
    """Run one engine with requests that come and go."""
    chosen = numbers.sample(list(methods), numbers.randint(0, min(3, len(methods))))
    drafter: Drafter = Chances(
        [_built(each, parts) for each in chosen], answers, parts.target.vocab_size, numbers
    )
    if numbers.random() < 0.7:
        clock = Clock(numbers)
        drafter = GuardedDrafter(drafter, Guard(clock), Guard(clock))
    engine = Engine(
        parts.target.fresh(numbers.choice((0, PREFIX_BYTES))),
        drafter,
        max_rows=numbers.randint(1, 6),
        chunk_seconds=numbers.choice((1e-6, 0.01, 0.1)),
    )
    requests = [_some_request(answers, numbers) for _ in range(numbers.randint(4, SESSIONS))]
    arrivals = [numbers.randrange(30) for _ in requests]
    aborts = {
        place: numbers.randrange(8) for place in range(len(requests)) if numbers.random() < 0.1
    }
    steps, ids, turn = dict[int, list[Step]](), dict[int, int](), 0
    while len(ids) < len(requests) or engine.busy:
        for place, arrival in enumerate(arrivals):
            if place not in ids and arrival <= turn:
                ids[place] = engine.add(requests[place])
        for place, after in aborts.items():
            if place in ids and len(steps.get(ids[place], ())) == after:
                engine.abort(ids[place])
        use(numbers.choice(of_variants), numbers.randint(1, THREADS))
        for step in engine.step():
            steps.setdefault(step.id, []).append(step)
        turn += 1
    counts.engines += 1
    for place, id in ids.items():
        _compare(requests[place], steps[id], answers, [each.name for each in chosen], counts)


def _built(method: Method, parts: Parts) -> Drafter:
    draft = parts.draft.fresh() if parts.draft is not None else None
    return method.build(replace(parts, draft=draft, pools={}))


def _some_request(answers: Answers, numbers: random.Random) -> Request:
    prompt = numbers.choice(list(answers))
    ends = numbers.sample(answers[prompt], numbers.choice((0, 0, 1)))
    return Request(list(prompt), numbers.randint(1, NEW), eos=frozenset(ends))


def _compare(
    request: Request, steps: list[Step], answers: Answers, methods: list[str], counts: Counts
) -> None:
    wanted = answers[tuple(request.tokens)][: request.max_new_tokens]
    end = next(
        (place for place, token in enumerate(wanted, 1) if token in request.eos), len(wanted)
    )
    found, reason = [token for step in steps for token in step.tokens], steps[-1].finish_reason
    complete = wanted[: len(found)] if reason == "abort" else wanted[:end]
    if found != complete or reason == "error":
        shown = [
            (step.number, step.rows, step.drafted, step.accepted, step.tokens, step.origins)
            for step in steps
        ]
        raise Difference(
            f"an output of engine {counts.engines - 1} is not that of decoding one by one; it ended by {reason}\n"
            f"drafters {methods}, prompt {list(request.tokens)}, ends {sorted(request.eos)}\n"
            f"found {found}\nwanted {complete}\nsteps (number, rows, drafted, accepted, tokens, origins) {shown}"
        ) from steps[-1].error
    counts.outputs += 1
    counts.aborted += reason == "abort"
    counts.tokens += len(found)
    counts.drafted += sum(step.drafted for step in steps)
    counts.accepted += sum(step.accepted for step in steps)
    counts.pauses += sum(step.rests for step in steps)
