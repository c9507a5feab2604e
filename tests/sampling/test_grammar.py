"""Structured output.

It follows the target's distribution restricted to a grammar, whatever is drafted. And what is
refused.
"""

import copy
import json
import os
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.baselines.lookahead import Lookahead
from benchmarks.baselines.lookup import Lookup
from forerun import Decoder, SamplingParams
from forerun.drafters.model_chain import ChainDrafter
from forerun.drafters.plain import PlainDrafter
from forerun.engine.draft import Draft
from forerun.engine.engine import Drafter, Proposal
from forerun.engine.sequence import Request, Sequence
from forerun.methods import AR, SD, Hybrid, Lyanna, Method, Ouroboros, Pacer, Parts, Suffix
from forerun.planning.stop_rules import FixedLength
from forerun.sampling import response_format as formats
from forerun.sampling import waits
from forerun.sampling.sampler import Sampler
from tests.support import toys
from tests.support.patience import patient
from tests.support.toys import TableLM, decode, refuses, tiny_tokenizer, tokens_of

llguidance = pytest.importorskip("llguidance")
grammar = pytest.importorskip("forerun.sampling.grammar")

FITS, BROKEN = 1e-4, 1e-6


def regex(text: str) -> dict[str, Any]:
    return {"type": "regex", "regex": text}


# Sampling: a vocabulary of six tokens, and a language small enough to be written down.

END, NAMES = 0, ["", "a", "b", "c", "ab", "bc"]
LANGUAGE = ("ca", "cab", "cb", "abab", "aba", "aac", "bb", "bba", "cc")
ROWS = 400
JOINT = 4
NEW = 6
PROMPT = [1, 2, 3, 2, 1, 2]  # after which phrases can be looked up, allowed ones and others
TARGET = toys.random_table(6, 1, 1.3)
DRAFT = toys.random_table(6, 2, 1.3)


@cache
def letters() -> PreTrainedTokenizerFast:
    vocab = {"<end>": END} | {name: token for token, name in enumerate(NAMES) if name}
    backend = Tokenizer(models.BPE(vocab, [("a", "b"), ("b", "c")]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def compiled(
    form: dict[str, Any], tokenizer: Any, ends: Iterable[int] = (0,), start: int = 0
) -> Any:
    return grammar.compiled(formats.form_of(form), tokenizer, frozenset(ends))(start)


def of_letters(start: int = len(PROMPT)) -> Any:
    return compiled(regex("|".join(LANGUAGE)), letters(), [END], start)


def follows(text: str) -> list[int]:
    """The tokens that may follow a text of the language: from its words alone."""
    tokens = [
        token
        for token, name in enumerate(NAMES)
        if name and any(w.startswith(text + name) for w in LANGUAGE)
    ]
    return tokens + [END] * (text in LANGUAGE)


@cache
def expected() -> Tensor:
    """[6] * JOINT: the exact distribution of the first tokens, filled up with end tokens."""

    def joint(tokens: list[int], text: str, left: int) -> Tensor:
        if not left:
            return torch.ones(())
        table = torch.zeros([6] * left)
        if tokens[-1] == END and len(tokens) > len(PROMPT):
            table[(END,) * left] = 1.0
            return table
        allowed = follows(text)
        probabilities = TARGET[tokens[-2], tokens[-1]][allowed].softmax(-1)
        for token, p in zip(allowed, probabilities, strict=True):
            table[token] = p * joint([*tokens, token], text + NAMES[token], left - 1)
        return table

    return joint(PROMPT, "", JOINT)


class Blind(ChainDrafter):
    """A draft that does not know the grammar. With `cut`, drafts end before a forbidden token."""

    def __init__(self, model: TableLM, cut: bool = False) -> None:
        super().__init__(model, FixedLength(3))
        self.cut = cut

    def propose(self, seqs: list[Sequence]) -> Proposal:
        samplers = [seq.sampler for seq in seqs]
        for seq in seqs:
            seq.sampler = Sampler(False)
        drafts = super().propose(seqs).drafts
        for at, (seq, sampler, draft) in enumerate(zip(seqs, samplers, drafts, strict=True)):
            seq.sampler = sampler
            if self.cut:
                with patient():
                    kept = sampler.fitting(seq.tokens, draft.tokens[1:])
                drafts[at] = Draft.chain(
                    draft.tokens[0], kept, draft.q[: len(kept)] if kept else None
                )
        return Proposal(drafts)


def build(method: Method) -> Drafter:
    return method.build(Parts(TableLM(TARGET), TableLM(DRAFT)))


DRAFTERS = {
    "ar": lambda: build(AR()),
    "sd": lambda: build(SD(3)),
    "lookup": lambda: build(Lookup(3, 2)),
    "suffix": lambda: build(Suffix()),
    "hybrid": lambda: build(Hybrid(threshold=2.0)),
    "lookahead": lambda: build(Lookahead(2, 2, 3)),
    "ouroboros": lambda: build(Ouroboros(guesses=3, ngram=3, suffixes=2, gamma=4)),
    "random trees": lambda: toys.RandomTrees(6),
    "a draft without the grammar": lambda: Blind(TableLM(DRAFT)),
}


def outcomes(
    drafter: Drafter, sampler: Any = Sampler, stops: bool = True, rows: int = ROWS
) -> list[list[int]]:
    """The first tokens of many sampled sequences, filled up with end tokens."""
    processor = of_letters()
    generator = torch.Generator().manual_seed(0)
    how: dict[str, Any] = {
        "eos": frozenset([END]),
        "stop": processor.stop(None) if stops else None,
        "generator": generator,
    }
    request = Request(PROMPT, NEW, sampler(False, LogitsProcessorList([processor])), **how)
    outputs = decode(TableLM(TARGET), drafter, [request] * rows)
    errors = [steps[-1].error for steps in outputs if steps[-1].error is not None]
    assert not errors, errors[0]
    return [(tokens_of(steps) + [END] * JOINT)[:JOINT] for steps in outputs]


def test_what_is_allowed_is_what_the_language_says() -> None:
    processor = of_letters(0)
    texts = {word[:n] for word in LANGUAGE for n in range(len(word) + 1)}
    for tokens in (
        combination for n in range(JOINT + 1) for combination in product(range(1, 6), repeat=n)
    ):
        text = "".join(NAMES[token] for token in tokens)
        scores = processor(
            torch.tensor([tokens], dtype=torch.long).view(1, -1), torch.zeros(1, 8)
        )  # two tokens too many
        allowed = scores[0].isfinite().nonzero().flatten().tolist()
        assert allowed == (sorted(follows(text)) if text in texts else list(range(8))), tokens


@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_output_follows_the_restricted_distribution(name: str) -> None:
    assert toys.p_value(outcomes(DRAFTERS[name]()), expected()) > FITS


class RootOnly(Sampler):
    """Masks after the last committed token, and not after drafted ones."""

    def scores(self, logits: Tensor, prefix: Any) -> Tensor:
        found = logits.float().clone()
        found[:1] = super().scores(logits[:1], prefix)
        return found


@pytest.mark.slow
def test_a_mask_at_the_root_alone_is_seen() -> None:
    assert toys.p_value(outcomes(DRAFTERS["sd"](), RootOnly, stops=False), expected()) == 0
    with pytest.raises(AssertionError, match="the response_format cannot be kept after"):
        outcomes(DRAFTERS["sd"](), RootOnly)  # nothing forbidden comes out of an engine unnoticed


def test_cutting_sampled_tokens_would_not_be_exact() -> None:
    # `Sampler.fitting` is for point masses: the tokens that are left no longer follow the
    # distribution that they were sampled from.
    assert toys.p_value(outcomes(Blind(TableLM(DRAFT), cut=True), rows=2000), expected()) < BROKEN


class Late(grammar.Grammar):
    """What may follow some tokens is known only between steps, when the engine asks for it."""

    last: tuple[int, ...] = ()
    is_slow = False

    def is_ready(self, ids: Any, waits: bool = False) -> bool:
        if waits and ids[-1] in (3, 4) and tuple(ids) != self.last:
            return False
        self.last = tuple(ids)
        with patient():
            return super().is_ready(ids, waits=True)


def late(seed: int | None = None, rows: int = ROWS) -> list[Request]:
    """Requests, each with a grammar of its own."""
    make = grammar.compiled(formats.form_of(regex("|".join(LANGUAGE))), letters(), frozenset([END]))
    processor = make(len(PROMPT))
    generator = torch.Generator().manual_seed(0)
    requests = []
    for stream in range(rows):
        rule = Late(processor._beginning, processor._tokens, len(PROMPT))
        sampler = Sampler(False, LogitsProcessorList([rule]))
        how: dict[str, Any] = {"stop": rule.stop(None), "generator": generator}
        request = Request(PROMPT, NEW, sampler, frozenset([END]), seed=seed, stream=stream, **how)
        requests.append(request)
    return requests


@pytest.mark.parametrize("name", ["sd", "random trees", "blind"])
def test_the_distribution_is_kept_where_masks_come_late(name: str) -> None:
    drafter = Blind(TableLM(DRAFT)) if name == "blind" else DRAFTERS[name]()
    outputs = decode(TableLM(TARGET), drafter, late())
    assert not [steps[-1].error for steps in outputs if steps[-1].error is not None]
    samples = [(tokens_of(steps) + [END] * JOINT)[:JOINT] for steps in outputs]
    assert toys.p_value(samples, expected()) > FITS
    assert any(not steps[-1].tokens and steps[-1].finish_reason == "stop" for steps in outputs)


@pytest.mark.parametrize("name", ["sd", "random trees", "a draft without the grammar"])
def test_a_seed_decides_also_where_masks_come_late(name: str) -> None:
    plain = decode(TableLM(TARGET), DRAFTERS["ar"](), late(seed=5, rows=40))
    found = decode(TableLM(TARGET), DRAFTERS[name](), late(seed=5, rows=40))
    assert list(map(tokens_of, found)) == list(map(tokens_of, plain))
    assert sum(step.accepted for each in found for step in each) > 10


AMBIGUOUS = 'start: start start start start | start start | "a" | ""'


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        ("MAX_TOKEN_SECONDS", "a token took more than"),
        ("MAX_STATE_SECONDS", "a text took more than"),
        ("MAX_FORM_SECONDS", "its texts took more than"),
    ],
)
def test_a_form_that_takes_too_long_ends_its_request_alone(
    bound: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = decoder("suffix")
    request = shared.request("the cat", response_format={"type": "grammar", "grammar": AMBIGUOUS})
    monkeypatch.setattr(grammar, bound, 1e-5)
    ids = [shared.engine.add(each) for each in (request, shared.request("the cat"))]
    steps = toys.drain(shared.engine)
    assert isinstance(steps[ids[0]][-1].error, grammar.FormError)
    assert f"it takes too long: {words}" in str(steps[ids[0]][-1].error)
    assert steps[ids[1]][-1].error is None


def test_a_slow_form_is_decoded_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the cat sat on the cat sat on the cat sat"
    quick = decoder("suffix").generate(text, response_format=regex("[a-z ]{30,40}"))
    monkeypatch.setattr(grammar, "SLOW_SECONDS", 0.0)
    slow = decoder("suffix").generate(text, response_format=regex("[a-z ]{30,40}"))
    assert slow.tokens == quick.tokens
    assert quick.stats.drafted and slow.stats.drafted <= 20


class Held(grammar.Grammar):
    """A grammar whose jobs stand still until they are let go."""

    def _find(self, text: Any) -> None:
        if len(text) > 2:
            self.go.wait(100)
        super()._find(text)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_slow_forms_leave_the_cores_to_steps() -> None:
    ours = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert grammar._slow_threads.submit(niceness).result() == min(ours + grammar.NICENESS, 19)
    assert grammar._threads.submit(niceness).result() == niceness() == ours


def test_others_are_decoded_while_a_mask_is_computed() -> None:
    """The row goes on as soon as its mask is there, with the tokens that it has alone."""
    shared = decoder("ar")
    request = shared.request("the cat", response_format=regex("[a-z]{9}"), max_new_tokens=20)
    first = shared.engine.add(request)
    alone = toys.drain(shared.engine)[first]
    own = request.sampler.constraint
    held = Held(own._beginning, own._tokens, own._start)
    held.go = threading.Event()
    sampler = Sampler(True, LogitsProcessorList([held]))
    late_one = replace(request, sampler=sampler, stop=held.stop(None))
    ids = [shared.engine.add(each) for each in (late_one, shared.request("a", max_new_tokens=30))]
    steps: dict[int, list[Any]] = {}
    while len(steps.get(ids[1], [])) < 30:
        toys.take_step(shared.engine, steps)
    assert sum(len(step.tokens) for step in steps[ids[0]]) == 3
    held.go.set()
    toys.drain(shared.engine, steps)
    assert tokens_of(steps[ids[0]]) == tokens_of(alone)
    # A client that leaves meanwhile is gone at once.
    held.go.clear()
    held._states.clear()
    gone = shared.engine.add(late_one)
    for _ in range(6):
        toys.take_step(shared.engine, steps)
    shared.engine.abort(gone)
    toys.take_step(shared.engine, steps)
    assert steps[gone][-1].finish_reason == "abort" and not shared.engine.running
    held.go.set()


class Never(grammar.Grammar):
    """A grammar that finds at once what may follow two tokens, and never what follows more."""

    def _begin(self, text: Any) -> Future[None]:
        job = Future[None]()
        if len(text) <= 2:
            self._find(text)
            job.set_result(None)
        return job


class Waits:
    """A clock that goes on with waits alone, each of which takes all the time that it has."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, jobs: Any, timeout: float) -> None:
        self.now += timeout


@pytest.mark.parametrize("name", ["suffix", "sd", "ouroboros"])
def test_all_waits_of_a_step_have_one_limit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is drafted, and for however many rows whose masks do not come."""
    clock = Waits()
    monkeypatch.setattr(waits, "wait", clock.wait)
    monkeypatch.setattr(waits, "perf_counter", lambda: clock.now)
    shared = decoder(name)
    text = "the cat sat on the cat sat on the cat sat"
    processor = compiled(regex("[a-z ]{30}"), tiny_tokenizer())
    start = len(tiny_tokenizer().encode(text))
    for _ in range(4):
        rule = Never(processor._beginning, processor._tokens, start)
        how = {"max_new_tokens": 40, "logits_processor": LogitsProcessorList([rule])}
        request = shared.request(text, **how)
        shared.engine.add(replace(request, stop=rule.stop(None)))
    shared.engine.add(shared.request("a", max_new_tokens=30))
    longest = 0.0
    for _ in range(8):
        before = clock.now
        shared.engine.step()
        longest = max(longest, clock.now - before)
    assert longest == pytest.approx(waits.STEP_SECONDS)


def test_the_last_token_has_a_wait_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of its step may be used up, and a whole answer would seem to be cut by its length."""
    original = waits.wait
    monkeypatch.setattr(
        waits, "wait", lambda jobs, timeout: original(jobs, 600 if timeout > 0 else 0)
    )
    compiled_form = compiled(regex("the cat"), tiny_tokenizer())
    rule = type(compiled_form)(compiled_form._beginning, compiled_form._tokens, 1)
    text = tiny_tokenizer().encode("the cat")
    sampler = Sampler(processors=LogitsProcessorList([rule]))
    seq = Sequence(Request([5], len(text), sampler, stop=rule.stop(None)))
    with waits.short_waits():
        monkeypatch.setattr(waits._allowance.get(), "left", 0.0)
        assert seq.extend(text, Mock()) == len(text)
    assert (seq.error, seq.finish_reason) == (None, "stop")


def test_a_call_that_has_kept_the_lock_is_followed_by_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python's lock, which the engine needs meanwhile. Short calls need no pause."""
    pauses: list[float] = []
    monkeypatch.setattr(grammar, "sleep", pauses.append)
    constraint = compiled(regex("[a-z ]{30,40}"), tiny_tokenizer())
    text = tuple(tiny_tokenizer().encode("the cat sat on the cat sat"))
    monkeypatch.setattr(grammar, "LOCK_SECONDS", 600.0)
    assert constraint.text_state(text).error is None and not pauses
    monkeypatch.setattr(grammar, "LOCK_SECONDS", 0.0)
    constraint = compiled(regex("[a-z ]{30,40}"), tiny_tokenizer())
    pauses.clear()
    assert constraint.text_state(text).error is None
    assert len(pauses) >= len(text) and min(pauses) > 0
    monkeypatch.setattr(grammar, "PAUSES", 1e9)  # as after a call that takes very long
    constraint = compiled(regex("[a-z ]{30,40}"), tiny_tokenizer())
    pauses.clear()
    assert constraint.text_state(text).error is None
    assert max(pauses) == grammar.LONGEST_PAUSE


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {
            "type": "array",
            "items": {"enum": ["cat", "dog", "cow"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": SCHEMA}}
VOCAB = 320  # the tokenizer has 300: the rest is padding
TEXTS = ["the cat sat on", '{"name": "aa", "size": 10, "tags": ["cat", "dog"]}', "def add(a, b):"]

METHODS: dict[str, Method] = {
    "ar": AR(),
    "sd": SD(4),
    "pacer": Pacer(),
    "lookup": Lookup(6, 2),
    "suffix": Suffix(),
    "hybrid": Hybrid(threshold=2.0, other="sd"),
    "lookahead": Lookahead(3, 3, 3),
    "ouroboros": Ouroboros(guesses=2, ngram=3, suffixes=2, gamma=5),
    "lyanna": Lyanna(depth=4, width=2, nodes=7),
}


@cache
def model() -> PreTrainedModel:
    return toys.tiny("llama", vocab=VOCAB)


def decoder(name: str, tokenizer: Any = None) -> Decoder:
    method = METHODS[name]
    small = toys.noisy_copy(model(), 0.03) if method.needs_draft else None
    parts = toys.parts_of(name, model(), small, hot=60)
    return Decoder(model(), tokenizer or tiny_tokenizer(), small, method, False, **parts)


def valid(text: str) -> bool:
    value = json.loads(text)
    assert list(value) == ["name", "size", "tags"]
    assert isinstance(value["name"], str) and len(value["name"]) <= 6 and 0 <= value["size"] <= 999
    return 1 <= len(value["tags"]) <= 3 and set(value["tags"]) <= {"cat", "dog", "cow"}


@cache
def reference(text: str) -> list[int]:
    """Greedy decoding token by token with llguidance alone, up to where only the end may follow."""
    tokenizer = tiny_tokenizer()
    vocabulary = llguidance.hf.from_tokenizer(tokenizer)
    matcher = llguidance.LLMatcher(
        vocabulary, llguidance.LLMatcher.grammar_from_json_schema(SCHEMA)
    )
    tokens = tokenizer.encode(text)
    output = []
    while not matcher.is_stopped():
        with torch.no_grad():
            logits = model()(torch.tensor([[*tokens, *output]])).logits[0, -1]
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        logits[[token for token in range(VOCAB) if not bits >> token & 1]] = -torch.inf
        output.append(int(logits.argmax()))
        assert matcher.consume_token(output[-1])
    return output


@pytest.mark.parametrize("name", METHODS)
def test_greedy_output_is_that_of_plain_decoding_under_the_mask_and_sampled_output_is_valid(
    name: str,
) -> None:
    used = decoder(name)
    rows = used.generate(TEXTS, response_format=JSON, max_new_tokens=120)
    assert [row.tokens for row in rows] == [reference(text) for text in TEXTS]
    assert all(valid(row.text) and row.finish_reason == "stop" for row in rows)
    if name != "ar":
        assert 0 < sum(row.stats.accepted for row in rows) < sum(row.stats.tested for row in rows)
    rows = used.generate(
        TEXTS * 3, response_format=JSON, max_new_tokens=120, temperature=1.0, top_p=0.9
    )
    assert all(valid(row.text) for row in rows) and len({row.text for row in rows}) > 5


def test_requests_of_one_batch_have_their_own_grammars() -> None:
    forms = [
        JSON,
        regex("[0-9]{3}(-[a-z]{2})?"),
        None,
        {"type": "grammar", "grammar": 'start: ("x" | "yy")~4'},
    ]
    alone = [
        decoder("sd").generate(TEXTS[0], response_format=form, max_new_tokens=60) for form in forms
    ]
    together = decoder("sd")
    for form in forms * 2:
        together.engine.add(together.request(TEXTS[0], response_format=form, max_new_tokens=60))
    found = toys.drain(together.engine)
    assert [tokens_of(found[id]) for id in sorted(found)] == [row.tokens for row in alone] * 2
    assert len({row.text for row in alone}) == len(forms) and valid(alone[0].text)


def test_states_do_not_depend_on_the_way_there() -> None:
    # Texts in any order, allowed and forbidden ones, more than are remembered.
    whole = [reference(text) for text in TEXTS]
    pick = Random(2).randrange
    used = compiled(JSON, tiny_tokenizer(), start=1)
    seen = set()
    for _ in range(150):
        text = whole[pick(3)]
        ids = torch.tensor(
            [[5, *text[: pick(len(text) + 1)], *([pick(300)] if pick(3) == 0 else [])]]
        )
        masked, fresh = (
            processor(ids, torch.zeros(1, VOCAB))
            for processor in (used, compiled(JSON, tiny_tokenizer(), start=1))
        )
        assert masked.equal(fresh)
        assert masked.isfinite().all() or not masked[0, 300:].isfinite().any()
        seen.add(tuple(ids[0].tolist()))
    assert len(seen) > grammar.MAX_STATES and len(used._states) <= grammar.MAX_STATES


@pytest.mark.parametrize(("most", "reason"), [(1, "length"), (2, "stop"), (9, "stop")])
def test_a_whole_text_ends_without_an_end_token(most: int, reason: str) -> None:
    row = decoder("lookup").generate(
        TEXTS[0], response_format=regex("[0-9][0-9]"), max_new_tokens=most
    )
    assert (row.finish_reason, len(row.tokens), row.text.isdigit()) == (reason, min(most, 2), True)


def test_an_open_text_ends_where_the_model_ends_it() -> None:
    class EndsSoon(PlainDrafter):
        def propose(self, seqs: list[Sequence]) -> Proposal:
            return Proposal([Draft.chain(seq.tokens[-1], [1, END, 3]) for seq in seqs])

    table = torch.zeros(6, 6, 6)
    table[..., END], table[..., 1] = 9.0, 5.0  # the end is best wherever it may stand, then a
    processor = compiled(regex("a{2,9}"), letters(), [END], 1)
    request = Request(
        [3],
        20,
        Sampler(True, LogitsProcessorList([processor])),
        frozenset([END]),
        processor.stop(None),
    )
    for drafter in (PlainDrafter(), EndsSoon()):
        ((*_, last),) = steps = decode(TableLM(table), drafter, [request])
        assert (tokens_of(steps[0]), last.finish_reason) == ([1, 1, END], "stop")
    with patient():
        assert processor.fitting([3], [1, 1, END, 1]) == 3
        assert processor.fitting([3], [1, END]) == 1
        assert processor.fitting([3, 1], []) == 0


def test_special_tokens_are_no_text_and_all_ends_may_end() -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    own = compiled(regex("(?s:.*)"), tokenizer, [0, 301])
    scores = own(torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, VOCAB))[0]
    assert scores[[0, 301]].isfinite().all() and scores[300].isinf() and scores[302:].isinf().all()
    closed = compiled(regex("x.*y"), tokenizer, [0, 301])
    for text in ("", "x", "x<|im_"):
        ids = torch.tensor([tokenizer.encode(text)], dtype=torch.long)
        assert closed(ids, torch.zeros(1, VOCAB))[0, [0, 300, 301]].isinf().all()


def test_a_tokenizer_of_pieces_writes_valid_json() -> None:
    asked: dict[str, Any] = {"response_format": JSON, "max_new_tokens": 120}
    plain, row = (decoder(name, toys.pieces()).generate("a cat", **asked) for name in ("ar", "sd"))
    assert valid(plain.text) and plain.tokens == row.tokens


BAD = [
    (5, "response_format must be a dict with a type, not 5"),
    (
        {},
        "response_format.type must be one of text, json_object, json_schema, regex, grammar, "
        "not None",
    ),
    ({"type": "x" * 999}, "not '" + "x" * 40 + "...'"),
    ({"type": "regex"}, "response_format.regex must be a text that is not empty, not None"),
    ({"type": "regex", "regex": "a\ud800"}, "response_format.regex has half of a surrogate pair"),
    (
        {"type": "grammar", "grammar": ["a"]},
        "response_format.grammar must be a text that is not empty, not a list",
    ),
    ({"type": "grammar", "grammar": "a" * 2**19}, "response_format.grammar has 524288 characters"),
    (
        {"type": "json_schema"},
        "response_format.json_schema must be {'schema': a JSON schema}, not None",
    ),
    ({"type": "json_schema", "json_schema": {"schema": []}}, "response_format.json_schema must be"),
    (
        {"type": "json_schema", "json_schema": {"schema": {"a": {1}}}},
        "response_format.json_schema.schema is no JSON",
    ),
    ({"type": "json_schema", "json_schema": {"schema": {"a": float("nan")}}}, "schema is no JSON"),
]
UNUSABLE = [
    (regex("(" * 5000), "cannot use response_format.regex: at 1(8): invalid regex"),
    (regex(r"(?=a)b"), "cannot use response_format.regex: "),
    (
        {"type": "grammar", "grammar": "start: x"},
        'cannot use response_format.grammar: at 1(8): unknown name: "x"',
    ),
    (
        {"type": "grammar", "grammar": "root ::= " + "(" * 9999},
        "cannot use response_format.grammar: ",
    ),
    (
        {"type": "grammar", "grammar": "start: start"},
        "cannot use response_format.grammar: it allows no text",
    ),
    (
        {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}},
        "json_schema: Invalid type: foo",
    ),
    (
        {"type": "json_schema", "json_schema": {"schema": {"not": {}}}},
        'Unimplemented keys: ["not"]',
    ),
    ({"type": "json_schema", "json_schema": {"schema": False}}, "Unsatisfiable schema"),
    (regex("a{2147483647}"), "it is too large: its repetitions need too many expressions"),
    (regex("((a{100}){100}){100}"), "it is too large: its repetitions need too many expressions"),
    (
        {
            "type": "json_schema",
            "json_schema": {"schema": {"properties": {f"p{i}": {} for i in range(2000)}}},
        },
        "at one place, of at most 2000 (max_items_in_row)",
    ),
]


@pytest.mark.parametrize(("form", "message"), BAD + UNUSABLE)
def test_a_form_that_cannot_be_used_is_refused(
    form: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A slow machine would refuse the largest ones because they take too long.
    monkeypatch.setattr(grammar, "MAX_STATE_SECONDS", 600.0)
    monkeypatch.setattr(grammar, "MAX_FORM_SECONDS", 600.0)
    with pytest.raises(ValueError) as error:
        params = SamplingParams(response_format=form)
        assert (form, message) in UNUSABLE  # the others are refused before any model is asked
        decoder("ar").generate("a", params)
    assert (
        message in str(error.value) and len(str(error.value)) < 300 and "\n" not in str(error.value)
    )


def test_a_form_whose_beginning_takes_too_long_is_not_said_to_allow_no_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar, "MAX_STATE_SECONDS", 0.0)
    message = "cannot use response_format.regex: it takes too long: a text took more than 0 seconds"
    refuses(message, decoder("ar").generate, "a", response_format=regex("a*"))


def test_values_too_deep_or_contradictory_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="nested too deeply"):
        SamplingParams(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    while schema:
        schema = schema["items"]  # level by level: letting go of all at once is deep as well
    refuses(
        "ignore_eos cannot be given with response_format",
        SamplingParams,
        response_format=JSON,
        ignore_eos=True,
    )
    plain = decoder("ar").generate("a", max_new_tokens=5).tokens
    assert (
        decoder("ar").generate("a", max_new_tokens=5, response_format={"type": "text"}).tokens
        == plain
    )


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(
        "response_format needs a tokenizer",
        Decoder(model(), method=AR()).generate,
        [1, 2],
        response_format=JSON,
    )
    endless = PreTrainedTokenizerFast(tokenizer_object=letters().backend_tokenizer)
    refuses(
        "response_format needs an end token",
        decoder("ar", endless).generate,
        [1, 2],
        response_format=JSON,
    )
    monkeypatch.setitem(sys.modules, "llguidance", None)
    refuses(r"pip install '\.\[grammar\]'", decoder("ar").generate, "a", response_format=JSON)


def test_a_dead_end_ends_one_request_alone() -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    shared = decoder("sd", tokenizer)
    forms = [
        {"type": "grammar", "grammar": 'start: "a" <|im_start|>'},
        regex("[0-9]{4}"),
    ]  # a special token is no text
    bad, good = (
        shared.engine.add(shared.request("the cat", response_format=form, max_new_tokens=9))
        for form in forms
    )
    steps = toys.drain(shared.engine)
    assert [steps[id][-1].finish_reason for id in (bad, good)] == ["error", "stop"]
    assert str(steps[bad][-1].error).startswith(
        "the response_format cannot be kept after 1 tokens: no token"
    )
    own = compiled(regex("a|b"), tokenizer)
    assert own.complete(tokenizer.encode("a"))
    refuses("after 1 tokens: the grammar forbids that text", own.complete, tokenizer.encode("z"))
