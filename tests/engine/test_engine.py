"""Requests join and leave: what each gets, what stays, and what happens when something fails."""

from __future__ import annotations

import gc
import threading
from collections import abc
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import logits_process as hf

from forerun import Decoder
from forerun.backends.heads import HiddenLM
from forerun.drafters.plain import PlainDrafter
from forerun.engine.engine import Engine, QueueFullError, Step
from forerun.engine.sequence import Request
from forerun.engine.session import FAILURES_TO_REPORT, Session
from forerun.methods import METHODS, method
from forerun.model.causal_lm import CausalLM
from forerun.model.prefix_store import PrefixStore
from forerun.sampling.sampler import Sampler
from tests.support import families
from tests.support.eagle3_heads import random_eagle3
from tests.support.failures import Panic, interrupt_once
from tests.support.toys import (
    METHOD_SETTINGS,
    VOCAB,
    TableLM,
    decode,
    drain,
    noisy_copy,
    parts_of,
    random_table,
    refuses,
    take_step,
    tiny,
    tokens_of,
)

NAMES = [*METHODS, "eagle3"]  # `eagle` with another head
PROCESSORS: list[LogitsProcessorList | None] = [
    None,
    LogitsProcessorList([hf.TemperatureLogitsWarper(0.7), hf.TopPLogitsWarper(0.9)]),
    LogitsProcessorList([hf.RepetitionPenaltyLogitsProcessor(1.4)]),
]
PROMPTS = [[5, 6, 7, 5, 6], [9], list(range(2, 42)), [11, 12, 11, 12, 11], list(range(30, 3, -1))]
LONGEST = 16  # tokens of an answer


@cache
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    return tiny("llama"), noisy_copy(tiny("llama"), 0.03)


@cache
def decoder(name: str) -> Decoder:
    target, draft = models()
    chosen = method(name.removesuffix("3"), **METHOD_SETTINGS.get(name, {}))
    parts = parts_of(name, target, draft)
    if name == "eagle3":
        parts["head"] = HiddenLM(random_eagle3(CausalLM(target)), CausalLM(target))
    return Decoder(target, None, draft, chosen, False, prefix_bytes=100_000, **parts)


def opened(name: str) -> Decoder:
    made = decoder(name)
    made.close()
    return made


def engine_of(name: str) -> Engine:
    return opened(name).engine


def alone(name: str, request: Request) -> list[int]:
    engine = engine_of(name)
    id = engine.add(request)
    return tokens_of(drain(engine)[id])


@cache
def plain_alone(prompt: int, processors: int, seed: int | None, stream: int) -> list[int]:
    """What plain decoding says to a request for LONGEST tokens alone, greedy without a seed."""
    sampler = Sampler(seed is None, PROCESSORS[processors])
    return alone("ar", Request(PROMPTS[prompt], LONGEST, sampler, seed=seed, stream=stream))


def cut(tokens: list[int], limit: int, eos: abc.Set[int]) -> list[int]:
    """The beginning of an output that a request with these ends is given."""
    ends = (count for count, token in enumerate(tokens[:limit], 1) if token in eos)
    return tokens[: next(ends, limit)]


# Requests that several tests make beside others.
PAIR = (Request(PROMPTS[0], 20), Request(PROMPTS[2], 25, Sampler(False), seed=2))
FOUR = (
    Request(PROMPTS[0], 12),
    Request(PROMPTS[2], 14, Sampler(False), seed=3),
    Request(PROMPTS[3], 10),
    Request(PROMPTS[1], 9, Sampler(False, PROCESSORS[1]), seed=4, stream=1),
)
FIVE = tuple(Request(PROMPTS[i], 20) for i in (0, 2, 3, 4, 1))
BESIDE = {"pair": PAIR, "four": FOUR, "five": FIVE}


@cache
def all_alone(name: str, requests: str) -> list[list[int]]:
    """What requests of BESIDE are given alone."""
    return [alone(name, request) for request in BESIDE[requests]]


def assert_empty(engine: Engine) -> None:
    assert not engine.target.cache.ids and not leftovers(engine.drafter)


def leftovers(thing: object, seen: set[int] | None = None) -> list[str]:
    """Names of what an object of ours, or one that it holds, still keeps by sequence."""
    seen = seen if seen is not None else set()
    if id(thing) in seen or not type(thing).__module__.startswith("forerun"):
        return []
    seen.add(id(thing))
    names = []
    values = dict(getattr(thing, "__dict__", {}))
    values.pop("_prompt", None)  # holds the last prompt, in buffers that stay
    for name, value in values.items():
        if name in KEPT and value and not isinstance(value, int):
            names.append(f"{type(thing).__name__}.{name}")
        for item in value.values() if isinstance(value, dict) else [value]:
            names += leftovers(item, seen)
    return names


KEPT = (
    "rows",
    "ids",
    "lengths",
    "states",
    "_states",
    "_rows",
    "features",
    "old",
)  # what is kept by sequence


@given(data=st.data())
@settings(max_examples=8)
@pytest.mark.parametrize("name", NAMES)
def test_a_request_is_given_what_it_is_given_alone(name: str, data: st.DataObject) -> None:
    """Random arrivals, aborts, lengths and seeds; greedy or sampled, with processors or without.

    Alone it is given what plain decoding says, of which one output serves requests of all lengths
    and ends.
    """
    requests, arrivals, wanted = [], [], []
    for _ in range(data.draw(st.integers(2, 7))):
        greedy = data.draw(st.booleans())
        processors = data.draw(st.integers(0, 2))
        sampler = Sampler(greedy, PROCESSORS[processors])
        eos = frozenset(data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=2)))
        seed = None if greedy else data.draw(st.integers(0, 1))
        stream = 0 if greedy else data.draw(st.integers(0, 1))
        prompt = data.draw(st.integers(0, len(PROMPTS) - 1))
        new = data.draw(st.integers(1, LONGEST))
        requests.append(Request(PROMPTS[prompt], new, sampler, eos, seed=seed, stream=stream))
        arrivals.append(data.draw(st.integers(0, 12)))
        wanted.append(cut(plain_alone(prompt, processors, seed, stream), new, eos))
    # After that number of steps; those that still wait can be aborted too.
    aborts = {
        index: data.draw(st.integers(0, 8))
        for index in data.draw(st.sets(st.integers(0, len(requests) - 1)))
    }
    engine = engine_of(name)
    engine.limits.max_rows = data.draw(st.integers(1, 5))
    ids: dict[int, int] = {}
    steps: dict[int, list[Step]] = {}
    turn = 0
    while len(ids) < len(requests) or engine.busy:
        for index, arrival in enumerate(arrivals):
            if arrival <= turn and index not in ids:
                ids[index] = engine.add(requests[index])
                steps[ids[index]] = []
        aborted = [
            id
            for index, id in ids.items()
            if index in aborts and len(steps[id]) >= aborts[index] and not ended(steps[id])
        ]
        for id in (*aborted, 12345):  # nobody
            engine.abort(id)
        take_step(engine, steps)
        assert len(engine.running) <= engine.max_rows
        assert all(steps[id][-1].finish_reason == "abort" for id in aborted)
        assert not {id for id in ids.values() if ended(steps[id])} & set(engine.target.cache.ids)
        turn += 1
    for index, id in ids.items():
        tokens = tokens_of(steps[id])
        reason = steps[id][-1].finish_reason
        if reason == "abort":
            assert index in aborts and tokens == wanted[index][: len(tokens)]
        else:
            assert tokens == wanted[index] and reason in ("stop", "length")
    assert_empty(engine)


def ended(steps: abc.Sequence[Step]) -> bool:
    return bool(steps) and steps[-1].finish_reason is not None


class Fails(LogitsProcessor, StoppingCriteria):
    """A user's processor or criterion that raises after `length` tokens.

    Without an error it leaves no token to sample.
    """

    def __init__(
        self, length: int, error: type[BaseException] | None, is_criterion: bool = False
    ) -> None:
        self.length = length
        self.error = error
        self.is_criterion = is_criterion

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] < self.length:
            return torch.zeros(len(input_ids), dtype=torch.bool) if self.is_criterion else scores
        if self.error is None:
            return torch.full_like(scores, -torch.inf)
        raise self.error("of the user")


def failing(prompt: abc.Sequence[int], how: str = "processor", greedy: bool = True) -> Request:
    error = {"panic": Panic, "nothing": None}.get(how.split()[0], ZeroDivisionError)
    fails = Fails(len(prompt) + 6, error, how.endswith("criterion"))
    criteria = StoppingCriteriaList([fails]) if fails.is_criterion else None
    processors = None if fails.is_criterion else LogitsProcessorList([fails])
    return Request(prompt, 20, Sampler(greedy, processors), criteria=criteria, seed=1)


FAILURES = [
    (name, how) for name in METHODS for how in ("processor", "criterion", "nothing to sample")
]
FAILURES += [("sd", "panic in a processor"), ("sd", "panic in a criterion")]


@pytest.mark.parametrize(("name", "how"), FAILURES)
def test_an_exception_of_a_user_ends_that_request_alone(name: str, how: str) -> None:
    wanted = all_alone(name, "pair")
    engine = engine_of(name)
    first = engine.add(PAIR[0])
    bad = [engine.add(failing(PROMPTS[4], how, False))]
    if (
        how != "nothing to sample"
    ):  # greedy decoding takes a token all the same, as transformers does
        bad.append(engine.add(failing(PROMPTS[3], how)))
    second = engine.add(PAIR[1])
    steps = drain(engine)
    kind = Panic if "panic" in how else ValueError if "nothing" in how else ZeroDivisionError
    for id in bad:
        assert steps[id][-1].finish_reason == "error" and len(tokens_of(steps[id])) <= 6
        assert isinstance(steps[id][-1].error, kind)
    assert [tokens_of(steps[id]) for id in (first, second)] == wanted
    assert_empty(engine)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=7)
@pytest.mark.parametrize("name", NAMES)
def test_what_goes_wrong_once_undoes_the_step_and_costs_nobody_anything(
    name: str, data: st.DataObject
) -> None:
    """A step that failed is undone, and no request loses anything.

    Interrupts and failures come anywhere, beside aborts, a processor that raises and sampled rows.
    """
    wanted = all_alone(name, "four")
    engine = engine_of(name)
    engine.limits.max_rows = data.draw(st.integers(1, 6))
    steps: dict[int, list[Step]] = {}
    ids = [engine.add(request) for request in FOUR[:2]]
    aborted = engine.add(Request(PROMPTS[4], 20))
    bad = engine.add(failing(PROMPTS[3]))
    ids += [engine.add(request) for request in FOUR[2:]]
    error = data.draw(st.sampled_from([None, RuntimeError(), Panic()]))
    after = data.draw(st.integers(0, 5))
    place = data.draw(st.sampled_from(CALLS if error else [*CALLS, *OTHER_CALLS]))
    if error is None:
        interrupt_once(*part(engine, place), after)
    turn = 0
    while engine.busy:
        turn += 1
        if turn == 3:
            engine.abort(aborted)
        if error is not None and turn == 1 + after:
            Breaking(*part(engine, place), error, times=1)
        with suppress(KeyboardInterrupt):
            take_step(engine, steps)
    # Drafters begin anew, so sampled tokens may use other random numbers where drafts depend on the
    # past.
    for id, request, tokens in zip(ids, FOUR, wanted, strict=True):
        found = tokens_of(steps[id])
        assert (
            found == tokens if request.sampler.greedy or name == "ar" else len(found) == len(tokens)
        ), place
    assert {steps[id][-1].finish_reason for id in ids} == {"length"}
    assert [steps[id][-1].finish_reason for id in (aborted, bad)] == ["abort", "error"]
    assert_empty(engine)


def test_what_is_undone_is_no_output_to_learn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("ar")
    id = engine.add(Request(PROMPTS[0], 3))
    reasons = list[str | None]()
    monkeypatch.setattr(engine.drafter, "drop", lambda seq: reasons.append(seq.finish_reason))
    interrupt_once(engine, "_observe", 2)  # in its last step
    steps: dict[int, list[Step]] = {}
    with pytest.raises(KeyboardInterrupt):
        drain(engine, steps)
    assert (
        len(drain(engine, steps)[id]) == 3
        and set(reasons[:-1]) == {None}
        and reasons[-1] == "length"
    )


@pytest.mark.parametrize("after", range(3))
def test_what_is_reported_is_reported_once(after: int) -> None:
    """An interrupt right after a report, before the step's end, takes nothing back."""
    engine = engine_of("ar")
    interrupt_once(*part(engine, "_reports.add_step"), after)
    id = engine.add(Request(PROMPTS[0], 3))
    steps: dict[int, list[Step]] = {}
    with pytest.raises(KeyboardInterrupt):
        drain(engine, steps)
    assert tokens_of(drain(engine, steps)[id]) == all_alone("ar", "four")[0][:3]
    assert_empty(engine)


CALLS = ["target.forward", "target.commit", "target.prefill", "target.join"]
CALLS += ["drafter.admit", "drafter.propose", "drafter.observe"]
OTHER_CALLS = [
    "target.drop",
    "target.save_prefix",
    "drafter.drop",
    "scheduler.release",
    "scheduler.admit",
    "scheduler.release_aborted",
    "scheduler.dismiss",
    "scheduler.requeue",
    "_observe",
    "_reports.add_step",
]


def part(engine: Engine, place: str) -> tuple[Any, str]:
    *owner, name = place.split(".")
    return getattr(engine, owner[0]) if owner else engine, name


class Breaking:
    """A method of one of the engine's parts that raises.

    It raises up to `times` times when it is called for one sequence, or for any.
    """

    def __init__(
        self, owner: Any, name: str, error: BaseException, id: int | None = None, times: int = 2**31
    ) -> None:
        self.call = getattr(owner, name)
        self.error = error
        self.id = id
        self.times = times
        self.calls = 0
        setattr(owner, name, self)

    @staticmethod
    def _id_of(given: Any) -> int:
        """Return the id of what a method is given: an id, a sequence or an outcome."""
        seq = getattr(given, "sequence", given)
        return getattr(seq, "id", seq)

    def __call__(self, ids: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.times and (self.id is None or self.id in [self._id_of(each) for each in ids]):
            self.times -= 1
            raise self.error
        return self.call(ids, *args, **kwargs)


@pytest.mark.parametrize(
    "error", [RuntimeError("of one"), Panic("of one")], ids=["exception", "panic"]
)
@pytest.mark.parametrize(
    "place", ["target.forward", "target.commit", "drafter.propose", "drafter.observe"]
)
@pytest.mark.parametrize("name", ["ar", "sd", "hybrid", "pacer-ouroboros", "lyanna"])
def test_who_makes_steps_fail_is_found_and_ended_alone(
    name: str, place: str, error: BaseException
) -> None:
    wanted = all_alone(name, "five")
    engine = engine_of(name)
    engine.limits.max_rows = 4  # so that the last one waits for a row
    ids = [engine.add(request) for request in FIVE]
    bad = ids[2]
    steps: dict[int, list[Step]] = {}
    while bad not in steps:
        take_step(engine, steps)
    broken = Breaking(*part(engine, place), error, bad)
    drain(engine, steps)
    last = steps[bad][-1]
    found = [tokens_of(steps[id]) for id in ids]
    assert last.finish_reason == "error" and last.error is error and last.tokens == ()
    assert found == [*wanted[:2], wanted[2][: len(found[2])], *wanted[3:]]
    assert {steps[id][-1].finish_reason for id in ids if id != bad} == {
        "length"
    } and broken.times == 2**31 - 2
    assert_empty(engine)


@pytest.mark.parametrize("place", ["forward", "prefill"])
def test_where_nothing_works_each_request_gets_its_try(place: str) -> None:
    engine = engine_of("sd")
    engine.limits.max_rows = 2
    ids = [engine.add(Request(prompt, 9)) for prompt in PROMPTS]
    broken = Breaking(engine.target, place, RuntimeError("the device is gone"))
    steps = drain(engine)
    assert [[step.finish_reason for step in steps[id]] for id in ids] == [["error"]] * 5
    assert broken.calls <= 2 * len(ids)
    assert_empty(engine)


def test_a_failure_that_comes_and_goes_ends_nobody() -> None:
    """As of a batch that is too large for the memory: alone each of its rows passes."""
    wanted = [alone("sd", Request(prompt, 12)) for prompt in PROMPTS]
    engine = engine_of("sd")
    ids = [engine.add(Request(prompt, 12)) for prompt in PROMPTS]
    forward = engine.target.forward

    def small(ids: abc.Sequence[int], *rest: Any) -> Any:
        if len(ids) > 2:
            raise MemoryError
        return forward(ids, *rest)

    engine.target.forward = small  # type: ignore[method-assign]
    steps = drain(engine)
    assert [tokens_of(steps[id]) for id in ids] == wanted
    # It learns how many pass together, and does not read all prompts anew at each step.
    assert engine.target.prefilled <= 4 * sum(map(len, PROMPTS)) + 4 * 12 * len(PROMPTS)


def test_a_text_that_cannot_be_kept_is_no_fault_of_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = [Request(prompt, 9) for prompt in PROMPTS[:3]]
    wanted = [alone("sd", request) for request in requests]
    engine = Engine(engine_of("sd").target.fresh(2**20), PlainDrafter())
    monkeypatch.setattr(
        PrefixStore, "put", lambda *args, **options: (_ for _ in ()).throw(MemoryError())
    )
    ids = [engine.add(request) for request in requests]
    steps: dict[int, list[Step]] = {}
    take_step(engine, steps)
    engine.abort(ids[2])
    drain(engine, steps)
    assert [tokens_of(steps[id]) for id in ids[:2]] == wanted[:2]
    assert steps[ids[2]][-1].finish_reason == "abort"


def test_who_is_cleared_is_no_suspect_any_more() -> None:
    engine = engine_of("ar")
    for prompt in PROMPTS[:3]:
        engine.add(Request(prompt, 9))
    Breaking(engine.target, "forward", RuntimeError(), times=1)
    rows = [[step.rows for step in steps] for steps in drain(engine).values()]
    assert len(rows) == 3 and all(each.count(1) >= 1 and max(each) == 3 for each in rows)


@pytest.mark.parametrize("place", ["forward", "prefill"])
def test_what_no_request_is_to_blame_for_is_raised_at_once(place: str) -> None:
    wanted = [alone("sd", Request(prompt, 9)) for prompt in PROMPTS[:2]]
    engine = engine_of("sd")
    ids = [engine.add(Request(prompt, 9)) for prompt in PROMPTS[:2]]
    broken = Breaking(engine.target, place, SystemExit("gone"), times=1)
    with pytest.raises(SystemExit):
        drain(engine)
    assert broken.calls == 1
    steps = drain(engine)
    assert [tokens_of(steps[id]) for id in ids] == wanted


def test_the_error_of_a_step_is_raised_to_its_cause_alone() -> None:
    made = opened("sd")
    wanted = made.generate(PROMPTS[0], max_new_tokens=30).tokens
    stream = made.stream(PROMPTS[0], max_new_tokens=30)
    chunks = [next(stream)]
    bad = made.engine.new_id() + 1
    Breaking(made.engine.target, "forward", RuntimeError("of one"), bad)
    with pytest.raises(RuntimeError, match="of one"):
        made.generate(PROMPTS[2], max_new_tokens=30)
    assert [token for chunk in [*chunks, *stream] for token in chunk.step.tokens] == wanted
    assert made.generate(PROMPTS[0], max_new_tokens=30).tokens == wanted


def test_an_error_of_a_drafter_has_its_traceback_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's exception has it, so the log has one line about the first try."""

    def propose(seqs: abc.Sequence[Any]) -> Any:
        raise ZeroDivisionError("of the user\nand more")

    made = opened("ar")
    monkeypatch.setattr(made.engine.drafter, "propose", propose)
    with caplog.at_level("INFO"), pytest.raises(ZeroDivisionError):
        made.generate(PROMPTS[0], max_new_tokens=5)
    (record,) = caplog.records
    line = record.getMessage()
    assert record.exc_info is None and "\n" not in line
    assert "(ZeroDivisionError: of the user, test_engine.py:" in line


def test_what_progress_raises_is_raised_once() -> None:
    made = opened("sd")
    reports = []

    def progress(read: int, total: int) -> None:
        reports.append(read)
        if len(reports) == 1:
            raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError):
        made.generate(PROMPTS[2], max_new_tokens=5, progress=progress)
    assert len(reports) == 1


def test_threads_that_share_a_decoder_get_their_own_output() -> None:
    made = opened("sd")
    options: list[dict[str, Any]] = [
        {"max_new_tokens": 6 + 3 * i} | ({"temperature": 1.0, "seed": i} if i % 2 else {})
        for i in range(8)
    ]
    wanted = [made.generate(PROMPTS[i % 5], **options[i]).tokens for i in range(8)]
    outputs: list[list[list[int]]] = [[] for _ in range(8)]
    rows: list[int] = []

    def work(i: int) -> None:
        for _ in range(6):
            if i == 3:
                steps = [chunk.step for chunk in made.stream(PROMPTS[3], **options[3])]
            else:
                steps = made.generate(PROMPTS[i % 5], **options[i]).steps
            rows.extend(step.rows for step in steps)
            outputs[i].append(tokens_of(steps))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == [[tokens] * 6 for tokens in wanted]
    assert max(rows) > 1  # they stood in one batch
    assert not made.engine.target.cache.ids


def test_a_stream_that_is_let_go_frees_its_rows_and_others_go_on() -> None:
    made = opened("sd")
    engine = made.engine
    wanted = made.generate(PROMPTS[0], max_new_tokens=30).tokens
    kept = made.stream(PROMPTS[0], max_new_tokens=30)
    chunks = [next(kept)]
    for _ in range(5):
        stream = made.stream(PROMPTS[:3], max_new_tokens=30)
        next(stream)
        del stream
        made.stream(PROMPTS[:2], max_new_tokens=30)  # never begun
    gc.collect()
    assert [token for chunk in [*chunks, *kept] for token in chunk.step.tokens] == wanted
    assert made.engine is engine and not engine.target.cache.ids and not engine.busy


@pytest.mark.slow
def test_a_prefix_that_requests_share_is_computed_once() -> None:
    target = tiny("llama", context=1024)
    shared = torch.randint(2, VOCAB, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [[*shared, 2 + i, 3, 4 + i] for i in range(16)]
    plain = Decoder(target, method=method("ar"), prefix_bytes=0)
    wanted = [plain.generate(prompt, max_new_tokens=8).tokens for prompt in prompts]
    for prefix_bytes in (2**26, 0):  # without a store the prompt before is known all the same
        draft = noisy_copy(target, 0.03)
        made = Decoder(
            target, draft=draft, method=method("sd"), guard=False, prefix_bytes=prefix_bytes
        )
        assert [row.tokens for row in made.generate(prompts, max_new_tokens=8)] == wanted
        before = made.engine.target.prefilled
        assert all(
            600 < model.prefilled <= 1.2 * 600
            for model in (made.engine.target, made.engine.drafter.model)
        )
        # Several sequences of one prompt need one prefill, or with a store none.
        rows = made.generate([prompts[0]] * 5, max_new_tokens=8, temperature=1.0, seed=3)
        assert len({tuple(row.tokens) for row in rows}) == 5
        assert made.engine.target.prefilled - before == (0 if prefix_bytes else len(prompts[0]) - 1)
    # What a finished request said is a prefix too, also for a draft that shows its states.
    made = opened("pacer")
    models = made.engine.target, made.engine.drafter.model
    turn = [*PROMPTS[2], *made.generate(PROMPTS[2], max_new_tokens=30).tokens, 5, 6]
    counts = [model.prefilled for model in models]
    assert made.generate(turn, max_new_tokens=8).tokens == alone("ar", Request(turn, 8))
    of_target, of_draft = (
        model.prefilled - count for model, count in zip(models, counts, strict=True)
    )
    assert of_target <= 4 and of_draft < 15


def test_a_draft_model_keeps_the_texts_that_the_target_keeps() -> None:
    """One store is for greedy and sampled requests, and is as much smaller as the draft is."""
    target = families.tiny("llama", num_hidden_layers=3)
    draft = families.tiny("llama", num_hidden_layers=1)
    made = Decoder(
        target,
        None,
        draft,
        method("sd"),
        guard=False,
        sampling_method=method("sd", gamma=2),
        prefix_bytes=240_000,
    )
    for i in range(12):
        made.generate([9 + i] * 20, max_new_tokens=10, temperature=i % 2)
    drafters = made.engine.drafter.drafters.values()  # type: ignore[attr-defined]
    of_target = made.engine.target.prompts.store
    of_draft, other = (drafter.model.prompts.store for drafter in drafters)
    assert of_draft is other and of_draft.limit == of_target.limit / 3
    assert 2 < len(of_target) < 12
    assert abs(len(of_draft) - len(of_target)) <= 1  # it has no text's last tokens


@pytest.mark.slow
def test_the_kv_budget_holds_and_a_request_that_can_never_fit_is_refused() -> None:
    target = tiny("llama", context=2048)
    wanted = [
        Decoder(target, method=method("ar")).generate(prompt, max_new_tokens=60).tokens
        for prompt in PROMPTS
    ]
    position = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, their size, bytes
    made = Decoder(
        target, draft=noisy_copy(target, 0.03), method=method("sd"), kv_memory=2 * 256 * position
    )
    engine = made.engine
    ids = [engine.add(Request(prompt, 60)) for prompt in PROMPTS]
    steps: dict[int, list[Step]] = {}
    while engine.busy:
        take_step(engine, steps)
        assert len(engine.running) <= 2
        assert engine.target.cache.allocated_bytes <= 2 * 256 * position
    assert [tokens_of(steps[id]) for id in ids] == wanted
    assert max(step.rows for own in steps.values() for step in own) == 2
    refuses("kv_memory", made.generate, PROMPTS[0], max_new_tokens=1500)


def test_the_queue_is_bounded_and_served_in_order() -> None:
    engine = Engine(TableLM(random_table(8, 1)), PlainDrafter(), max_rows=2, max_queue=3)
    ids = [engine.add(Request([1, 2], 3 + i)) for i in range(5)]  # two rows are free
    with pytest.raises(QueueFullError):
        engine.add(Request([1], 1))
    first: dict[int, list[Step]] = {}
    while engine.busy:
        take_step(engine, first)
        if len(ids) < 8 and len(engine.waiting) < 3:
            ids.append(engine.add(Request([1, 2], 2)))
    assert list(first) == ids
    for name in ("max_rows", "max_queue", "kv_memory"):
        refuses(
            f"{name} must be at least 1, not 0",
            Engine,
            TableLM(random_table(8, 1)),
            PlainDrafter(),
            **{name: 0},
        )


def test_a_long_prompt_does_not_hold_up_those_that_run() -> None:
    engine = Engine(TableLM(random_table(8, 1)), PlainDrafter(), chunk_seconds=1e-9)
    running = engine.add(Request([1, 2], 200))
    engine.step()
    long = engine.add(Request([3] * 2000, 4))
    seen, before = [running], engine.target.prefilled
    while engine.busy and seen[-1] == running:
        seen += [step.id for step in engine.step()]
        assert (
            engine.target.prefilled - before <= 256
        )  # a chunk, of which the first is not measured yet
        before = engine.target.prefilled
    assert seen[-1] == long and len(seen) > 6


def test_mistakes_are_refused_when_they_are_added() -> None:
    engine = Decoder(tiny("llama"), method=method("ar")).engine
    refuses("at least one token", Request, [], 5)
    refuses("max_new_tokens must be at least 1, not 0", Request, [1], 0)
    refuses("fills the context of 256", engine.add, Request([1] * 256, 5))
    assert not engine.busy


def test_buffers_are_allocated_once() -> None:
    made = opened("sd")
    made.generate(PROMPTS * 2, max_new_tokens=30)
    models = made.engine.target, made.engine.drafter.model
    caches = [kv_cache for model in models for kv_cache in (model.cache, model.prompts.cache)]
    before = [layer.keys.data_ptr() for kv_cache in caches for layer in kv_cache.layers]
    for i in range(20):
        made.generate(PROMPTS[i % 5 :] * 2, max_new_tokens=5 + i)
    assert [layer.keys.data_ptr() for kv_cache in caches for layer in kv_cache.layers] == before


# Callers that share an engine.


@pytest.mark.parametrize("failing", [0, FAILURES_TO_REPORT - 1, FAILURES_TO_REPORT])
def test_one_thread_steps_for_all_and_goes_on_after_steps_that_fail(failing: int) -> None:
    asked = [Request(prompt, 9 + i) for i, prompt in enumerate(PROMPTS[:3])]
    wanted = [tokens_of(steps) for steps in decode(CausalLM(tiny("llama")), PlainDrafter(), asked)]
    session = Session(Engine(CausalLM(tiny("llama")), PlainDrafter()))
    done = threading.Event()
    left = [ZeroDivisionError()] * failing
    advance = session.engine.advance
    failures = list[BaseException]()

    def fails() -> None:
        if left:
            raise left.pop()
        advance()

    def on_steps(pairs: list[Any]) -> None:
        assert all(run is not None for run, _ in pairs)
        if not session.runs():
            done.set()

    session.engine.advance = fails  # type: ignore[method-assign]
    runs = [session.add(asked[:2]), session.add(asked[2:])]
    thread = threading.Thread(target=session.drive, args=(on_steps, failures.append))
    thread.start()
    assert done.wait(60)
    session.stop()
    thread.join(60)
    assert not thread.is_alive() and len(failures) == (failing == FAILURES_TO_REPORT)
    tokens: list[list[int]] = [[], [], []]
    for first, run in zip((0, 2), runs, strict=True):
        for index, step in run.take():
            tokens[first + index] += step.tokens
    assert tokens == wanted
