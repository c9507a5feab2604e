"""Replays recorded steps through the planner, beside never and always drafting and an oracle.

    python -m benchmarks.speed.replay                                   # replay.json
    python -m benchmarks.speed.replay --slower-draft 8
    python -m benchmarks.speed.replay --record OUT.json --target smollm2 --prompts 8

`--slower-draft` multiplies the recorded times of the draft model, but not those in the table of
costs, so it asks how the planner bears with a table that is wrong.

A recording has greedy outputs and, for each of their tokens, both outcomes: what a plain step took,
and what a draft of the draft model at this place took and how much of it was accepted. What
suffixes would have drafted there follows from the text. So any plan can be replayed: `hybrid` as
users have it, with its guard, its choice of the source, automatic lengths and corrected costs, runs
on a clock that the recorded times move on. The oracle knows how much of each draft is accepted and
takes the best plan for all of a text. Steps have one row. The planner's own time is not counted.

Prompts are those of validation, which no page shows results of.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

import torch

from forerun import Decoder, load
from forerun.drafters.model_chain import ChainDrafter
from forerun.drafters.suffix import SuffixDrafter
from forerun.engine.acceptance import Verdict
from forerun.engine.draft import Draft
from forerun.engine.scheduler import LARGEST_CHUNK
from forerun.engine.sequence import Request
from forerun.engine.sequence import Sequence as EngineSequence
from forerun.engine.step import Drafter, RowOutcome
from forerun.engine.target import ChunkSize, EngineChunks
from forerun.methods import AR, SD, Hybrid, Parts, Suffix
from forerun.planning.corrected_costs import CorrectedCosts
from forerun.planning.cost_model import Costs, costs_of
from forerun.planning.guard import Guard, GuardedDrafter
from forerun.planning.length import LONGEST_CHAIN
from forerun.planning.stop_rules import FixedLength
from forerun.sampling.sampler import Drafted
from forerun.text.chat import chat_prompt

FOLDER = Path(__file__).parent
RECORDING = FOLDER / "replay.json"
PROMPTS = FOLDER / "chat" / "validation.jsonl"


@dataclass(frozen=True)
class Text:
    """A recorded output.

    Attributes:
        prompt: its tokens.
        output: the n tokens of the output.
        accepted: [n] how many of LONGEST_CHAIN tokens would be accepted that are drafted before
            each token of the output.
        plain_ms: [n] the time of the plain step that gave it.
        draft_ms: [n] the time of a token of that draft.
    """

    prompt: list[int]
    output: list[int]
    accepted: list[int]
    plain_ms: list[float]
    draft_ms: list[float]


@dataclass(frozen=True)
class Recording:
    """Recorded outputs, and the table of costs on that machine."""

    costs: Costs
    texts: list[Text]

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read a recording."""
        data = json.loads(path.read_text())
        return cls(costs_of(data["costs"]), [Text(**text) for text in data["texts"]])

    def with_slower_draft(self, factor: float) -> Recording:
        """Return a recording in which drafts took longer, with the same table."""

        def slower(text: Text) -> Text:
            return replace(text, draft_ms=[factor * ms for ms in text.draft_ms])

        return replace(self, texts=[slower(text) for text in self.texts])


# Recording.


def recorded(decoder: Decoder, prompts: Sequence[Sequence[int]], tokens: int) -> Recording:
    """Decode prompts plainly, and draft at each place of the outputs."""
    options = {"max_new_tokens": tokens, "ignore_eos": True}
    measuring = decoder.replace(method=SD(), guard=False)
    measuring.generate(list(prompts[0]), max_new_tokens=2)  # warms up, and measures costs
    assert measuring.costs is not None
    plain = decoder.replace(method=AR(), guard=False)
    plain.generate(list(prompts[0]), max_new_tokens=8)
    texts = []
    for prompt in prompts:
        done = plain.generate(list(prompt), **options)
        plain_ms = [round(1000 * step.seconds, 2) for step in done.steps]
        accepted, draft_ms = drafts_along(decoder, list(prompt), list(done.tokens))
        texts.append(Text(list(prompt), list(done.tokens), accepted, plain_ms, draft_ms))
    return Recording(measuring.costs, texts)


@torch.inference_mode()
def drafts_along(
    decoder: Decoder, prompt: list[int], output: list[int]
) -> tuple[list[int], list[float]]:
    """Return how much of a draft before each token is accepted, and the ms of a drafted token."""
    assert decoder.draft is not None
    vocab_size = decoder.target.vocab_size
    drafter = ChainDrafter(decoder.draft.fresh(), FixedLength(LONGEST_CHAIN), vocab_size)
    seq = EngineSequence(Request(prompt, len(output) + LONGEST_CHAIN + 1))
    for _ in drafter.admit(seq, None, len(prompt)):
        pass
    accepted = []
    draft_ms = []
    for place, token in enumerate(output):
        started_at = perf_counter()
        proposal = drafter.propose([seq])
        ms = 1000 * (perf_counter() - started_at)
        draft = proposal.drafts[0]
        accepted.append(agreeing(draft.tokens[1:], output[place:]))
        draft_ms.append(round(ms / max(1, draft.drafted), 3))
        seq.tokens.append(token)
        drafter.observe([RowOutcome(seq, draft, Verdict([0], token, 1, True))], proposal.memo)
    drafter.drop(seq)
    return accepted, draft_ms


def agreeing(tokens: Sequence[int], text: Sequence[int]) -> int:
    """Return how many first tokens agree with a text."""
    count = 0
    while count < min(len(tokens), len(text)) and tokens[count] == text[count]:
        count += 1
    return count


# Replaying.


class RecordedDraft:
    """The draft model of a recording: it drafts what is recorded, and moves a clock on.

    It is as much of a `CausalLM` as drafters of chains with fused drafts need. Of a draft only its
    accepted tokens are right; the others are -1, which no output has.
    """

    context = None
    cache = None

    def __init__(self, recording: Recording, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.prompts = SimpleNamespace(known=lambda tokens, salt: 0)
        self.now = 0.0  # in ms
        self._read = 0  # tokens of the last prompt
        self.texts: dict[int, Text] = {}
        self.lengths: dict[int, int] = {}
        self.fused_draft = self._draft
        self._costs = recording.costs

    def clock(self) -> float:
        """Return the time in seconds."""
        return self.now / 1000

    def prefill(self, tokens: Sequence[int], chunk: ChunkSize, **_: Any) -> Iterator[int]:
        """Read a prompt."""
        self.now += self._costs.at(len(tokens) / 2).reading(len(tokens))
        self._read = len(tokens)
        yield len(tokens)

    def join(self, id: int, reserve: int) -> None:
        """Begin a row with the prompt that was read."""
        self.lengths[id] = self._read

    def __contains__(self, id: int) -> bool:
        return id in self.lengths

    def length(self, id: int) -> int:
        """Return the tokens that a row has."""
        return self.lengths[id]

    def crop(self, ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Cut rows."""
        self.lengths |= zip(ids, lengths, strict=True)

    def drop(self, id: int) -> None:
        """Forget a row."""
        self.lengths.pop(id, None)

    def save_prefix(self, id: int, tokens: Sequence[int], **_: Any) -> None:
        """Keep nothing."""

    def forget_prompt(self) -> None:
        """Keep nothing."""

    def _draft(
        self, cache: Any, id: int, pending: list[int], bounds: Any, eos: Any, sampling: Any
    ) -> Drafted:
        """Return what is recorded at the place after the pending tokens."""
        text = self.texts[id]
        place = self.lengths[id] + len(pending) - len(text.prompt)
        count = bounds.max_tokens
        right = text.output[place : place + min(count, text.accepted[place])]
        tokens = [*right, *[-1] * (count - len(right))]
        self.lengths[id] += len(pending) + count - 1
        self.now += count * text.draft_ms[place]
        return Drafted(tokens, None, [1.0] * count)


Made = Callable[[RecordedDraft, Recording], Drafter]


def planned(model: RecordedDraft, recording: Recording) -> Drafter:
    """Return `hybrid` with an automatic length as an engine has it."""
    corrected = CorrectedCosts(recording.costs)
    parts = Parts(
        cast(Any, SimpleNamespace(vocab_size=model.vocab_size)),
        cast(Any, model),
        costs=recording.costs,
        corrected=corrected,
        guarded=lambda drafter: GuardedDrafter(drafter, Guard(model.clock)),
        pools={},
    )
    drafter = Hybrid(other="sd").build(parts)
    return GuardedDrafter(drafter, Guard(model.clock), None, corrected)


def always_model(model: RecordedDraft, recording: Recording) -> Drafter:
    """Return the draft model's chains of the length without costs, in every step."""
    return ChainDrafter(cast(Any, model), FixedLength(5))


def always_suffix(model: RecordedDraft, recording: Recording) -> Drafter:
    """Return suffix drafts in every step."""
    return SuffixDrafter(Suffix())


def verify_ms(costs: Costs, text: Text, place: int, nodes: int) -> float:
    """Return the ms of a target forward: by the table, times the load of the recorded step."""
    table = costs.at(len(text.prompt) + place)
    return table.verify(nodes) / table.verify(1) * text.plain_ms[place]


def replayed(recording: Recording, made: Made) -> list[float]:
    """Return the ms of each text, decoded one after the other by one drafter."""
    size = 1 + max(max(*text.prompt, *text.output) for text in recording.texts)
    model = RecordedDraft(recording, size)
    chunks = EngineChunks(lambda: LARGEST_CHUNK, is_alone=lambda: True)
    drafter = made(model, recording)
    times = []
    for id, text in enumerate(recording.texts):
        started_at = model.now
        model.texts[id] = text
        seq = EngineSequence(Request(text.prompt, len(text.output)), id)
        for _ in drafter.admit(seq, None, chunks):
            pass
        while seq.remaining:
            step(drafter, model, seq, text, recording.costs)
        seq.finish_reason = "length"
        drafter.drop(seq)
        times.append(model.now - started_at)
    return times


def step(
    drafter: Drafter, model: RecordedDraft, seq: EngineSequence, text: Text, costs: Costs
) -> None:
    """Take a step as the engine does."""
    place = len(seq.tokens) - seq.prompt_length
    proposal = drafter.propose([seq])
    draft = proposal.drafts[0]
    assert draft.is_chain
    left = text.output[place:]
    count = min(agreeing(draft.tokens[1:], left), len(left) - 1)
    rejected = count < draft.drafted
    model.now += verify_ms(costs, text, place, len(draft))
    seq.tokens += left[: count + 1]
    verdict = Verdict(list(range(count + 1)), left[count], count + rejected, rejected)
    drafter.observe([RowOutcome(seq, draft, verdict)], proposal.memo)


# The oracle.


def oracle(recording: Recording) -> list[float]:
    """Return the least ms of each text, of all plans by these sources."""
    suffixes = SuffixDrafter(Suffix())
    times = []
    for text in recording.texts:
        by_suffix = suffix_drafts(suffixes, text)
        plans = (best_ms(recording.costs, text, by_suffix, uses) for uses in (False, True))
        times.append(min(plans))
    return times


def suffix_drafts(suffixes: SuffixDrafter, text: Text) -> list[int]:
    """Return how many tokens of the suffix draft before each token would be accepted."""
    seq = EngineSequence(Request(text.prompt, len(text.output)))
    for _ in suffixes.admit(seq, None, len(text.prompt)):
        pass
    accepted = []
    for place, token in enumerate(text.output):
        draft: Draft = suffixes.find(seq, 1)[0]
        accepted.append(agreeing(draft.tokens[1:], text.output[place:]))
        seq.tokens.append(token)
    suffixes.drop(seq)
    return accepted


def best_ms(costs: Costs, text: Text, by_suffix: list[int], uses_model: bool) -> float:
    """Return the least ms of a text, with or without the draft model, which reads the prompt.

    It never drafts a token that would be rejected, so the best length is at most what is accepted.
    """
    count = len(text.output)
    left = [0.0] * (count + 1)  # the least ms from each place on
    for place in reversed(range(count)):
        forwards = dict.fromkeys(range(by_suffix[place] + 1), 0)
        if uses_model:
            longer = range(by_suffix[place] + 1, text.accepted[place] + 1)
            forwards |= zip(longer, longer, strict=True)
        left[place] = min(
            drafted * text.draft_ms[place]
            + verify_ms(costs, text, place, length + 1)
            + left[min(place + length + 1, count)]
            for length, drafted in forwards.items()
        )
    reading = costs.reading(len(text.prompt)) if uses_model else 0.0
    return left[0] + reading


def results(recording: Recording) -> dict[str, list[float]]:
    """Return the ms of each text by each plan."""
    return {
        "never": [sum(text.plain_ms) for text in recording.texts],
        "always the draft model": replayed(recording, always_model),
        "always suffixes": replayed(recording, always_suffix),
        "planner": replayed(recording, planned),
        "oracle": oracle(recording),
    }


def table(recording: Recording) -> str:
    """Return the results as a table: ms per token, and speedups over never drafting."""
    by_plan = results(recording)
    tokens = sum(len(text.output) for text in recording.texts)
    never = by_plan["never"]
    lines = ["| plan | ms per token | speedup | median of texts | worst text |"]
    lines.append("|---|---:|---:|---:|---:|")
    for plan, times in by_plan.items():
        speedups = [plain / ms for plain, ms in zip(never, times, strict=True)]
        cells = [sum(times) / tokens, sum(never) / sum(times), median(speedups), min(speedups)]
        lines.append(f"| {plan} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recording", nargs="?", type=Path, default=RECORDING)
    parser.add_argument("--slower-draft", type=float, default=1.0, metavar="FACTOR")
    parser.add_argument("--record", type=Path, metavar="OUT", help="record, and write it here")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--data", type=Path, default=PROMPTS, help="prompts of validation")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of each output")
    args = parser.parse_args()
    if args.record is None:
        recording = Recording.read(args.recording)
        print(table(recording.with_slower_draft(args.slower_draft)))
        return
    decoder = load(args.target)
    lines = args.data.read_text().splitlines()[: args.prompts]
    prompts = [chat_prompt(decoder.tokenizer, json.loads(line)["messages"]) for line in lines]
    recording = recorded(decoder, prompts, args.tokens)
    about = {"target": args.target, "prompts": args.data.name, "machine": platform.processor()}
    texts = [asdict(text) for text in recording.texts]
    data = {"about": about, "costs": asdict(recording.costs), "texts": texts}
    args.record.write_text(json.dumps(data) + "\n")
    print(table(recording))


if __name__ == "__main__":
    main()
