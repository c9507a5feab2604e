"""Text in whole characters, and stop strings to the token."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, StopStringCriteria
from transformers.convert_slow_tokenizer import bytes_to_unicode

from forerun.api.loading import load_tokenizer
from forerun.text.stop_strings import LateStopStrings, StopStrings, TextStream
from tests.support.toys import pieces as make_pieces
from tests.support.toys import tiny_tokenizer

ODD = "\ufffd"
# The tokenizer has "ab", "aa" and the like; other characters take two to four tokens each.
texts = st.text(alphabet="ab c\u00e9\u6f22\U0001f600", max_size=14)
stops = st.lists(st.text(alphabet="ab c\u00e9\u6f22", min_size=1, max_size=4), max_size=3)


@st.composite
def chunked(draw: st.DrawFn) -> tuple[str, list[list[int]]]:
    text = draw(texts)
    ids = tiny_tokenizer().encode(text)
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(ids) - 1)))))
    edges = [0, *(at for at in cuts if at < len(ids)), len(ids)]
    return text, [ids[a:b] for a, b in pairwise(edges)]


def known(ids: Sequence[int]) -> str:
    """The whole characters that tokens spell."""
    return tiny_tokenizer().decode(ids).rstrip(ODD)


def beginning(text: str, stop: Sequence[str]) -> int:
    """How much of the text's end may be the beginning of a stop string, by trying all."""
    ends = [n for s in stop for n in range(len(s)) if text.endswith(s[:n])]
    return max(ends, default=0)


def push(stream: TextStream, ids: Sequence[int], finished: bool) -> str:
    pieces = stream.push(ids, ["draft"] * len(ids), finished)
    assert all(text for text, _ in pieces)
    return "".join(text for text, _ in pieces)


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked() -> None:
    class Loud(PreTrainedTokenizerFast):
        def _decode(self, *given: Any, **more: Any) -> str:
            return super()._decode(*given, **more).upper()

    ids = tiny_tokenizer().encode("the cat")
    for kind in (PreTrainedTokenizerFast, Loud):
        stream = TextStream(kind(tokenizer_object=tiny_tokenizer().backend_tokenizer), [])
        assert push(stream, ids, finished=True) == (
            "the cat" if kind is PreTrainedTokenizerFast else "THE CAT"
        )


@given(chunked(), stops, texts)
def test_text_is_of_whole_characters(
    chunks: tuple[str, list[list[int]]], stop: list[str], prompt: str
) -> None:
    text, parts = chunks
    before = [] if stop else tiny_tokenizer().encode(prompt)  # where a stop string might begin
    stream = TextStream(tiny_tokenizer(), before, stop)
    seen = []
    emitted = ""
    for i, ids in enumerate(parts, 1):
        finished = i == len(parts)
        emitted += push(stream, ids, finished)
        seen += ids
        whole = known(seen)
        assert stream.text == emitted and ODD not in emitted
        places = [whole.find(s) for s in stop if s in whole]
        if places:
            assert stream.stopped and emitted == whole[: min(places)]
            assert stream.stop_string in stop
            assert whole[min(places) :].startswith(stream.stop_string)
            # Whatever comes after it is not text any more.
            assert push(stream, tiny_tokenizer().encode("abc"), True) == ""
            return
        # What only looked like a stop string is released as soon as that is known; nothing else is
        # held.
        assert emitted == whole[: len(whole) - (0 if finished else beginning(whole, stop))]
    assert emitted == text and not stream.stopped


def test_pieces_carry_the_origin_of_the_token_that_completed_them() -> None:
    tokenizer = tiny_tokenizer()
    x, y, q, smile = (tokenizer.encode(letter) for letter in ("x", "y", "q", "\U0001f600"))
    assert len(smile) == 4
    stream = TextStream(tokenizer, [])
    assert stream.push(x + smile[:2], ["draft"] * 3, False) == [("x", "draft")]
    found = stream.push(smile[2:] + x, ["lookup", "bonus", "draft"], False)
    assert found == [("\U0001f600", "bonus"), ("x", "draft")]
    # So does what only looked like a stop string.
    stream = TextStream(tokenizer, [], ["xyz"])
    assert stream.push(x, ["draft"], False) == stream.push(y, ["bonus"], False) == []
    assert stream.push(q, ["draft"], False) == [("x", "draft"), ("y", "bonus"), ("q", "draft")]
    # At the end, half a stop string is text.
    assert stream.push(x + y, ["draft"] * 2, True) == [("x", "draft"), ("y", "draft")]


def test_characters_that_are_broken_by_the_prompt_or_the_end() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("a\u6f22")
    end = [tokenizer.eos_token_id]  # which is no text
    stream = TextStream(tokenizer, [])
    assert push(stream, ids[:-2], False) == "a"
    push(stream, ids[-2:-1] + end, True)
    assert stream.text == tokenizer.decode(ids[:-1]) and ODD in stream.text
    for split in (2, 3):
        stream = TextStream(tokenizer, ids[:split])
        push(stream, [*ids[split:], *tokenizer.encode("ab"), *end], True)
        assert stream.text.endswith("ab") and stream.text.strip(ODD) == "ab"


pieces = cache(make_pieces)


@cache
def embedded() -> PreTrainedTokenizerBase:
    return load_tokenizer("embedded")


@cache
def theirs(
    tokenizer: Callable[[], PreTrainedTokenizerBase], stop: tuple[str, ...]
) -> StopStringCriteria:
    return StopStringCriteria(tokenizer(), list(stop))


STOPS = [
    ("ab",), ("a", "ab", "ba a"), ("b a",), ("abab", "bab"), (" ",), ("\n\n", "\n"),
    ("</s>", "<|endoftext|>"), ("a</s>",), ("t.", "\u00e9", "\u6f22"), ("a\u00e9b",),
    ("\U0001f600a",), ("def ", "return a", "self."), ("(a, b)",),
]  # fmt: skip


@given(
    st.lists(st.text("ab .\u00e9\u6f22", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple)
    | st.sampled_from(STOPS),
    st.lists(st.integers(0, 299), max_size=12),
    st.randoms(),
)
def test_any_tokens_end_where_theirs_end(
    stop: tuple[str, ...], others: list[int], chance: random.Random
) -> None:
    """Most tokens are such as the stop strings are made of, and they end with one."""
    for tokenizer in (
        (tiny_tokenizer, pieces, embedded) if stop in STOPS else (tiny_tokenizer, pieces)
    ):
        near = [
            token
            for text in stop
            for token in tokenizer().encode("a" + text + chance.choice(["", "b", " "]))
        ]
        tokens = [*others, *(chance.choice(near) for _ in range(10)), *near]
        ours = StopStrings(tokenizer(), stop)
        answers = [ours(tokens[:n]) for n in range(1, len(tokens) + 1)]
        try:
            criterion: Any = theirs(tokenizer, stop)
        except ValueError:  # transformers refuses strings that no token ends; they cannot come
            assert not any(answers)
            continue
        assert answers == [
            bool(criterion(torch.tensor([tokens[:n]]), None)) for n in range(1, len(tokens) + 1)
        ]
        assert any(answers)


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer, pieces])
def test_a_stop_string_ends_in_the_last_token_wherever_it_begins(tokenizer: Any) -> None:
    def ids(text: str) -> list[int]:
        return tokenizer().encode(text, add_special_tokens=False)

    stop = StopStrings(tokenizer(), ["ab st", "\u6f22"])
    prompt = ids("xx ab s")
    assert stop(prompt + ids("t")[-1:])  # it begins in the prompt
    whole = ids("xx ab st")
    assert stop(whole) and not stop(whole + ids("c")[-1:])  # it stands wholly in the prompt
    split = ids("a\u6f22")
    assert [stop(split[:n]) for n in range(1, len(split) + 1)] == [False] * (len(split) - 1) + [
        True
    ]
    assert not StopStrings(tokenizer(), [])(whole)


def test_tokens_without_text_do_not_hide_a_stop_string() -> None:
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "": 2}, []))
    backend.decoder = decoders.Fuse()
    stop = StopStrings(PreTrainedTokenizerFast(tokenizer_object=backend), ["ab"])
    assert stop([0, *[2] * 9, 1]) and not stop([0, 1, 2])
    assert not stop([0, 7, 1])  # 7 is padding of the embedding: it is in no text


def test_a_vocabulary_of_any_size_costs_nothing_to_begin_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = embedded()
    asked = []
    kind = type(tokenizer)
    plain = type(tokenizer).convert_tokens_to_string
    monkeypatch.setattr(kind, "get_vocab", lambda self: pytest.fail("the vocabulary was read"))
    monkeypatch.setattr(
        kind,
        "convert_tokens_to_string",
        lambda self, tokens: asked.append(tokens) or plain(self, tokens),
    )
    stop = StopStrings(tokenizer, ["return"])
    ids = tokenizer.encode("def add(a, b):\n    return a + b\n") * 3
    for n in range(1, len(ids) + 1):
        stop(ids[:n])
    assert len(asked) <= 1 + len(set(ids))  # each token once


@given(
    st.lists(st.integers(0, 299), max_size=10),
    st.lists(st.integers(0, 299), min_size=1, max_size=14),
    stops,
)
def test_text_ends_with_tokens(prompt: list[int], tokens: list[int], stop: list[str]) -> None:
    """What the stream releases of a prompt's continuation, up to the token that ends it.

    Special tokens are among it.
    """
    tokenizer = tiny_tokenizer()
    has_ended = StopStrings(tiny_tokenizer(), stop)
    count = next(
        (n for n in range(1, len(tokens) + 1) if has_ended(prompt + tokens[:n])), len(tokens)
    )
    stream = TextStream(tokenizer, prompt, stop)
    text = ""
    for n, token in enumerate(tokens[:count], 1):
        text += push(stream, [token], n == count)
    # No stop string and no end of one that began in the prompt, unless the prompt ends within a
    # character.
    if tokenizer.eos_token_id not in tokens:
        assert not any(s in text for s in stop)
    if has_ended(prompt + tokens[:count]) and not tokenizer.decode(prompt).endswith(ODD):
        assert stream.stopped
    elif not stream.stopped and ODD not in tokenizer.decode(tokens):
        assert text == tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_stop_string_that_began_in_the_prompt_is_cut() -> None:
    tokenizer = tiny_tokenizer()
    prompt, more, s, x = (tokenizer.encode(text) for text in ("xx ab", "QR", "S", "x"))
    for last, text in ((s, ""), (x, "QRx")):
        stream = TextStream(tokenizer, prompt, ["abQRS", "zz"])
        assert push(stream, more, False) == "" and push(stream, last, last == s) == text
        assert stream.stopped == (last == s)
    # The longer stop string is held from the prompt on. The shorter one lies wholly in the prompt
    # and does not count.
    assert push(TextStream(tokenizer, prompt, ["abQ", "b", "ab"]), x, True) == "x"


def test_protected_tokens_complete_no_stop_string() -> None:
    tokenizer = tiny_tokenizer()
    x, a, b, c = (tokenizer.encode(text) for text in "xabc")
    has_ended = LateStopStrings(StopStrings(tokenizer, ["ab", "c"]), len(x) + 2)
    assert not has_ended(x + a + b) and not has_ended(x + c) and has_ended(x + a + b + c)
    assert has_ended(x + x + a + b)  # it may begin in them

    def text(*parts: list[int], protected: int = 2) -> tuple[str, str | None]:
        stream = TextStream(tokenizer, x, ["ab", "c"], protected=protected)
        pieces = [push(stream, part, part is parts[-1]) for part in parts]
        return "".join(pieces), stream.stop_string

    assert text(a, b, c) == text(a + b, c) == text(a + b + c) == ("ab", "c")
    assert text(c, a, b) == text(c + a + b) == ("c", "ab")
    assert text(c, c) == ("cc", None) and text(c, c, c) == ("cc", "c")
    assert text(a, b, protected=0) == ("", "ab")
    lead, *rest = tokenizer.encode("é")
    stream = TextStream(tokenizer, x, ["é"], protected=1)  # which holds half of the character
    assert push(stream, [lead], False) == "" and push(stream, rest, False) == ""
    assert stream.stopped


def test_a_special_token_counts_for_stop_strings_and_is_no_text() -> None:
    tokenizer = tiny_tokenizer()
    a = tokenizer.encode("a")
    end = [tokenizer.eos_token_id]
    b = tokenizer.encode("b")
    stop = ["a<|endoftext|>b"]
    assert StopStrings(tokenizer, stop)(a + end + b)
    stream = TextStream(tokenizer, b, stop)
    assert (
        push(stream, b + a, False) == "b"
        and push(stream, end, False) == ""
        and push(stream, b, True) == ""
    )
    other = TextStream(tokenizer, b, stop)
    assert push(other, a + end, False) == "" and push(other, a, True) == "aa"


@pytest.mark.parametrize("stop", [[], ["<|end|>!"]])
@pytest.mark.parametrize("kind", ["special", "halves", "a half after which nothing comes"])
def test_tokens_without_text_cost_no_more_and_more(
    kind: str, stop: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer()
    runs = 400
    special = tokenizer.all_special_ids[0]
    half = tokenizer.convert_tokens_to_ids(bytes_to_unicode()[0x80])
    lead, *rest = tokenizer.encode("\U0001f600")
    endless = {"special": [special] * runs, "halves": [half] * runs}.get(
        kind, [lead, *[special] * runs]
    )
    stream = TextStream(tokenizer, tokenizer.encode("ab"), stop)
    read = list[int]()
    decode = stream._decode
    monkeypatch.setattr(
        stream,
        "_decode",
        lambda ids, *args, **more: read.append(len(ids)) or decode(ids, *args, **more),
    )
    ids = [*tokenizer.encode("a"), *endless, *tokenizer.encode("b\u00e9"), lead, *rest]
    text = "".join(
        push(stream, [token], finished=at == len(ids) - 1) for at, token in enumerate(ids)
    )
    assert text == tokenizer.decode(ids, skip_special_tokens=True) and max(read) < 50
