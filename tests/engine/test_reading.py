"""Prompts are read in turns: short ones do not wait for long ones, and nothing is read twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from forerun import Decoder
from forerun.drafters.plain import PlainDrafter
from forerun.engine.engine import Engine
from forerun.engine.reading import Chunk, PrefillRates, Reading, Readings
from forerun.engine.scheduler import LARGEST_CHUNK, SMALLEST_CHUNK
from forerun.engine.sequence import Request, Sequence
from forerun.engine.step import Step
from forerun.engine.target import ChunkSize, next_size
from forerun.methods import method
from forerun.model.causal_lm import CausalLM
from tests.support import toys
from tests.support.toys import TableLM, tokens_of

CONTEXT = 2048
CHUNK = SMALLEST_CHUNK  # if there is no time for more
TABLE = toys.random_table(6, 1)


def text(length: int, seed: int = 0, vocab: int = 6) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(1, vocab, (length,), generator=generator)]


def busy_engine(max_rows: int = 16) -> tuple[Engine, int, dict[int, list[Step]]]:
    """An engine that has time for one chunk between two steps, and a stream in it."""
    engine = Engine(TableLM(TABLE), PlainDrafter(), max_rows=max_rows, chunk_seconds=1e-9)
    stream = engine.add(Request([1], 2000))
    steps: dict[int, list[Step]] = {}
    toys.take_step(engine, steps)
    return engine, stream, steps


def until_first(engine: Engine, id: int, steps: dict[int, list[Step]]) -> int:
    """How many steps the stream makes before a request has its first token."""
    before = len(steps[0])
    while id not in steps:
        toys.take_step(engine, steps)
    return len(steps[0]) - before


@pytest.mark.parametrize("many", [1, 3])
def test_a_short_prompt_does_not_wait_for_long_ones(many: int) -> None:
    engine, _, steps = busy_engine()
    long = [engine.add(Request(text(60 * CHUNK, seed), 2)) for seed in range(many)]
    for _ in range(5):
        toys.take_step(engine, steps)
    short = engine.add(Request(text(CHUNK, 9), 2))
    assert until_first(engine, short, steps) <= 4
    # And a prompt of some chunks comes before those of many, which come to their ends too.
    middle = engine.add(Request(text(6 * CHUNK, 8), 2))
    assert until_first(engine, middle, steps) <= 2 * 6 + 4
    assert not any(id in steps for id in long)
    count = max(until_first(engine, id, steps) for id in long)
    assert count <= (60 + 2) * many


@pytest.mark.parametrize("turns", [4, 5])
def test_the_first_turn_beside_a_prompt_that_was_alone_goes_to_a_shorter_one(turns: int) -> None:
    engine, _, steps = busy_engine()
    engine.add(Request(text(60 * CHUNK), 2))
    for _ in range(turns):
        toys.take_step(engine, steps)
    assert until_first(engine, engine.add(Request(text(CHUNK, 9), 2)), steps) == 1


def test_a_short_prompt_goes_before_the_copies_of_a_long_one() -> None:
    class Copying(TableLM):
        """Copies 30 layers when a prompt has been read."""

        def prefill(self, *args: Any, **how: Any) -> Iterator[int]:
            yield from super().prefill(*args, **how)
            for _ in range(30):
                clock[0] += 1.0
                yield 0

        def clock(self) -> float:
            return clock[0]

    clock = [0.0]
    engine = Engine(Copying(TABLE), PlainDrafter(), chunk_seconds=2.5)
    engine.add(Request([1], 3000))
    steps: dict[int, list[Step]] = {}
    toys.take_step(engine, steps)
    reads: list[int] = []
    length = LARGEST_CHUNK + 100
    prompt = text(length)
    long = engine.add(Request(prompt, 2, progress=lambda read, total: reads.append(read)))
    while reads[-1:] != [length - 1]:
        toys.take_step(engine, steps)
    short = engine.add(Request(text(CHUNK, 9), 2))
    assert until_first(engine, short, steps) <= 2 and long not in steps
    before = len(steps[0])
    while long not in steps:
        toys.take_step(engine, steps)
    # Several layers are copied between two steps.
    assert len(steps[0]) - before <= 15


def test_copied_layers_of_a_prompt_do_not_take_turns_with_chunks_of_another() -> None:
    class Known(TableLM):
        """Copies 30 layers of a known text before it reads a prompt."""

        def prefill(self, *args: Any, **how: Any) -> Iterator[int]:
            yield from [0] * 30
            yield from super().prefill(*args, **how)

        def clock(self) -> float:
            return float(self.prefilled)  # copies take no time

    engine = Engine(Known(TABLE), PlainDrafter(), chunk_seconds=1e-9)
    stream = engine.add(Request([1], 2000))
    steps: dict[int, list[Step]] = {}
    while stream not in steps:
        toys.take_step(engine, steps)
    long = engine.add(Request(text(60 * CHUNK), 2))
    for _ in range(5):
        toys.take_step(engine, steps)
    short = engine.add(Request(text(6 * CHUNK, 9), 2))
    assert until_first(engine, short, steps) <= 2 * 6 + 4
    assert long not in steps


def test_short_prompts_that_keep_coming_do_not_starve_a_long_one() -> None:
    engine, _, steps = busy_engine()
    long = engine.add(Request(text(20 * CHUNK), 2))
    for number in range(60):
        if long in steps:
            break
        engine.add(Request(text(CHUNK, 100 + number), 1))
        toys.take_step(engine, steps)
    assert number <= 2 * 20 + 4


@pytest.mark.parametrize("length", [1, 2, 4, CHUNK // 2])
def test_tiny_prompts_that_keep_coming_do_not_starve_a_long_one(length: int) -> None:
    """They take next to no time, but each is given a step of its own before the next chunk."""
    engine, reads, steps = timed_engine()
    before = len(reads)
    for number in range(40):
        engine.add(Request(text(length + 1, 100 + number), 1))
        toys.take_step(engine, steps)
    assert len(reads) - before >= 40 // 2 - 2


class Timed(TableLM):
    """Takes a second to read a token."""

    def clock(self) -> float:
        return float(self.prefilled)


def timed_engine() -> tuple[Engine, list[int], dict[int, list[Step]]]:
    """An engine that reads 24 tokens a step, a stream, and what was read of a long prompt."""
    engine = Engine(Timed(TABLE), PlainDrafter(), chunk_seconds=1.5 * CHUNK)
    stream = engine.add(Request([1], 2000))
    steps: dict[int, list[Step]] = {}
    while stream not in steps:
        toys.take_step(engine, steps)
    reads: list[int] = []
    engine.add(Request(text(60 * CHUNK), 2, progress=lambda read, total: reads.append(read)))
    for _ in range(4):
        toys.take_step(engine, steps)
    return engine, reads, steps


def test_several_short_prompts_are_read_between_two_chunks_of_a_long_one() -> None:
    engine, reads, steps = timed_engine()
    before = len(reads)
    short = [engine.add(Request(text(CHUNK // 4 + 1, seed), 2)) for seed in range(4)]
    while not all(id in steps for id in short):
        toys.take_step(engine, steps)
    assert len(reads) <= before + 1


def test_a_step_is_made_as_soon_as_a_newcomer_is_read() -> None:
    engine, reads, steps = timed_engine()
    before = len(reads)
    short = engine.add(Request(text(CHUNK // 4 + 1, 9), 2))
    toys.take_step(engine, steps)
    assert short in steps and len(reads) == before


def test_a_slow_chunk_keeps_nobody_waiting_for_long() -> None:
    readings = Readings()
    long, short = (
        Reading(Sequence(Request([1, number], 2)), (_ for _ in ()), 0, left)
        for number, left in enumerate((1000, 10))
    )
    for reading in (long, short):
        readings.add(reading)
    assert readings.next() is short
    readings.count(short, Chunk(5, 5), turns=100.0)
    assert readings.next() is long
    readings.count(long, Chunk(16, long.left - 16), turns=0.5)
    assert readings.next() is short
    # Nor does one chunk of the long prompt let others have a hundred.
    readings.count(short, Chunk(1, 4), turns=0.1)
    assert readings.next() is short
    readings.count(short, Chunk(1, 3), turns=0.4)
    assert readings.next() is long
    readings.count(long, Chunk(16, long.left - 16), turns=100.0)
    readings.count(short, Chunk(1, 2), turns=0.5)
    readings.count_early_step(0.5)
    assert readings.next() is long


def test_late_parts_of_long_prompts_do_not_say_how_long_short_ones_take() -> None:
    rates = PrefillRates(100.0)
    assert rates.at(0) == rates.at(5000) == 100.0
    rates.measure(0, 64, 0.1)
    assert rates.at(0) == rates.at(5000) == 640.0
    rates.measure(4096, 64, 1.0)
    rates.measure(4160, 64, 2.0)
    assert rates.at(0) == 640.0 and rates.at(5000) == rates.at(3000) == 32.0
    # Two short prompts are read before the same step, beside the end of a long one.
    engine, reads, steps = timed_engine()
    engine.scheduler._rates.measure(reads[-1], CHUNK, 100.0 * CHUNK)
    before = len(reads)
    short = [engine.add(Request(text(CHUNK // 2 + 1, seed), 2)) for seed in range(2)]
    toys.take_step(engine, steps)
    assert all(id in steps for id in short) and len(reads) == before


def test_a_newcomer_is_decoded_before_a_long_prompt_that_came_to_an_idle_engine() -> None:
    engine = Engine(TableLM(TABLE), PlainDrafter(), chunk_seconds=1e-9)
    added: list[int] = []

    def progress(read: int, total: int) -> None:
        if not added:
            added.append(engine.add(Request(text(20, 3), 3)))

    long = engine.add(Request(text(1900), 2, progress=progress))
    first = engine.step()
    assert [step.id for step in first] == added
    steps = toys.drain(engine)
    assert len(tokens_of(steps[long])) == 2 and len(tokens_of(steps[added[0]])) == 2


def test_a_long_prompt_that_came_first_has_small_chunks_once_others_stream() -> None:
    engine = Engine(TableLM(TABLE), PlainDrafter(), chunk_seconds=1e-9)
    reads: list[int] = []
    long = engine.add(Request(text(1900), 2, progress=lambda read, total: reads.append(read)))
    engine.add(Request(text(300, 3), 400))
    steps = toys.drain(engine)
    sizes = [after - before for before, after in pairwise([0, *reads])]
    assert len(tokens_of(steps[long])) == 2
    assert sizes[-1] <= CHUNK and sizes.count(CHUNK) >= 1900 // CHUNK - 2 * 256 // CHUNK - 1


@pytest.mark.parametrize("is_beside", [False, True])
def test_an_abort_is_seen_after_the_chunk(is_beside: bool) -> None:
    """As a client leaves while its prompt is read, with others or alone."""
    engine = Engine(TableLM(TABLE), PlainDrafter(), chunk_seconds=1e-9)
    reads: list[int] = []

    def progress(read: int, total: int) -> None:
        reads.append(read)
        engine.abort(long)

    other = engine.add(Request(text(300, 7), 2)) if is_beside else None
    long = engine.add(Request(text(1900), 2, progress=progress))
    steps = toys.drain(engine)
    assert len(reads) == 1 and engine.target.prefilled <= 256 + 300
    assert [step.finish_reason for step in steps[long]] == ["abort"]
    if other is not None:
        assert len(tokens_of(steps[other])) == 2


class Copies(TableLM):
    """Notes chunks (c), copies to the prefix store (C) and to rows (J), and steps (.)."""

    def __init__(self) -> None:
        super().__init__(TABLE)
        self.done: list[str] = []

    def prefill(self, *args: Any, **how: Any) -> Iterator[int]:
        for size in super().prefill(*args, **how):
            self.done.append("c")
            yield size
        self.done.append("C")

    def join(self, id: int, reserve: int = 0) -> None:
        self.done.append("J")
        super().join(id, reserve)

    def forward(self, ids: Any, *args: Any, **how: Any) -> Any:
        self.done.append(".")
        return super().forward(ids, *args, **how)


class Reads(PlainDrafter):
    """Reads prompts in chunks (d) of the sizes that it is told."""

    def __init__(self, done: list[str], on_chunk: Any = lambda size: None) -> None:
        self.done = done
        self.on_chunk = on_chunk

    def admit(self, seq: Sequence, hidden: Any, chunk: ChunkSize) -> Iterator[int]:
        left = len(seq.tokens)
        while left > 0:
            size = next_size(chunk)
            left -= size
            self.done.append("d")
            self.on_chunk(size)
            yield size


def test_copies_of_a_long_prompt_are_a_turn_of_their_own() -> None:
    """Between its last chunk and the drafter's first one others make their steps."""
    target = Copies()
    engine = Engine(target, Reads(target.done), chunk_seconds=1e-9)
    steps: dict[int, list[Step]] = {}
    engine.add(Request([1], 2000, plain=True))
    toys.take_step(engine, steps)
    target.done.clear()
    long = engine.add(Request(text(LARGEST_CHUNK + 2), 2))
    until_first(engine, long, steps)
    assert "c.CJ.d.d" in "".join(target.done)


def test_the_chunks_of_a_drafter_follow_the_load() -> None:
    """They are large while its request is alone, and small as soon as others stream."""
    sizes: list[int] = []

    def note(size: int) -> None:
        sizes.append(size)
        if len(sizes) == 2:
            engine.add(Request(text(20, 3), 400, plain=True))

    engine = Engine(TableLM(TABLE), Reads([], note), chunk_seconds=1e-9)
    long = engine.add(Request(text(1900), 2))
    steps = toys.drain(engine)
    assert len(tokens_of(steps[long])) == 2
    assert sizes[0] == 256 and sizes[-1] == CHUNK and sizes.count(CHUNK) > 20


def test_one_that_fails_while_others_are_read_fails_alone() -> None:
    engine, _, steps = busy_engine()

    def progress(read: int, total: int) -> None:
        if read > 3 * CHUNK:
            raise RuntimeError("no more")

    bad = engine.add(Request(text(9 * CHUNK), 3, progress=progress))
    good = [engine.add(Request(text(9 * CHUNK, seed), 3)) for seed in (1, 2)]
    toys.drain(engine, steps)
    assert str(steps[bad][-1].error) == "no more"
    for seed, id in zip((1, 2), good, strict=True):
        (alone,) = toys.decode(TableLM(TABLE), PlainDrafter(), [Request(text(9 * CHUNK, seed), 3)])
        assert tokens_of(steps[id]) == tokens_of(alone)


METHODS = ("ar", "sd", "hybrid", "lyanna", "ouroboros")


def decoder(name: str, **options: Any) -> Decoder:
    model = toys.tiny("llama", context=CONTEXT)
    wants = method(name)
    head = toys.random_head(CausalLM(model), kind=name) if wants.head else None
    draft = toys.noisy_copy(model, 0.05) if wants.needs_draft else None
    return Decoder(model, None, draft, wants, False, head=head, **options)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_said_does_not_depend_on_the_turns(name: str) -> None:
    """Prompts of many lengths, some of which begin alike, each as it is alone."""
    head = text(150, 5, 60)
    prompts = [
        head + text(200, 1, 60),
        text(20, 2, 60),
        head + text(5, 3, 60),
        text(400, 4, 60),
        head + text(200, 1, 60),
        text(90, 6, 60),
    ]
    solo = decoder(name)
    alone = [solo.generate(prompt, max_new_tokens=8).tokens for prompt in prompts]
    made = decoder(name, prefix_bytes=2**22)
    engine = made.engine
    engine.limits.chunk_seconds = 1e-9
    steps: dict[int, list[Step]] = {}
    stream = engine.add(made.request(text(3, 9, 60), max_new_tokens=90))
    toys.take_step(engine, steps)
    ids = []
    for prompt in prompts:
        ids.append(engine.add(made.request(prompt, max_new_tokens=8)))
        toys.take_step(engine, steps)
    most = 0
    while engine.busy:
        most = max(most, engine.prefilling)
        toys.take_step(engine, steps)
    assert most >= 3 and len(tokens_of(steps[stream])) == 90
    assert [tokens_of(steps[id]) for id in ids] == alone


def test_what_prompts_have_in_common_is_read_once() -> None:
    made = decoder("ar", prefix_bytes=2**22)
    engine = made.engine
    engine.limits.chunk_seconds = 1e-9
    common = text(320, 5, 60)
    asked = [made.request(common, max_new_tokens=3) for _ in range(6)]
    asked += [made.request(common + text(8, seed, 60), max_new_tokens=3) for seed in range(3)]
    for request in asked:
        engine.add(replace(request))
    toys.drain(engine)
    assert made.target.prefilled + engine.target.prefilled <= 320 + 3 * 40
