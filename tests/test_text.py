"""TextStream: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import tiny_tokenizer

from forerun.text import TextStream

ODD = "\ufffd"
# The tokenizer has learnt "ab", "aa" and the like; the others take two to four tokens each.
texts = st.text(alphabet="ab c\u00e9\u6f22\U0001f600", max_size=14)
stops = st.lists(st.text(alphabet="ab c\u00e9\u6f22", min_size=1, max_size=4), max_size=3)


@st.composite
def chunked(draw: st.DrawFn) -> tuple[str, list[list[int]]]:
    """A text, and its tokens in chunks of any size."""
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


@given(chunked(), texts)
def test_all_text_comes_in_whole_characters(chunks: tuple[str, list[list[int]]], prompt: str) -> None:
    text, parts = chunks
    stream = TextStream(tiny_tokenizer(), tiny_tokenizer().encode(prompt))
    seen: list[int] = []
    for i, ids in enumerate(parts, 1):
        piece = push(stream, ids, finished=i == len(parts))
        seen += ids
        assert ODD not in piece
        # Nothing that is certain is held back.
        assert stream.text == known(seen)
    assert stream.text == text and not stream.stopped


@given(chunked(), stops)
def test_nothing_of_a_stop_string_leaks(chunks: tuple[str, list[list[int]]], stop: list[str]) -> None:
    text, parts = chunks
    stream, seen, emitted = TextStream(tiny_tokenizer(), [], stop), [], ""
    for i, ids in enumerate(parts, 1):
        finished = i == len(parts)
        emitted += push(stream, ids, finished)
        seen += ids
        whole = known(seen)
        assert stream.text == emitted
        found = [whole.find(s) for s in stop if s in whole]
        if found:
            assert stream.stopped and emitted == whole[: min(found)]
            # Whatever comes behind it is not text any more.
            assert push(stream, tiny_tokenizer().encode("abc"), True) == ""
            return
        # What only looked like a stop string is out again as soon as that is known.
        assert emitted == whole[: len(whole) - (0 if finished else beginning(whole, stop))]
    assert emitted == text and not stream.stopped


@given(texts, stops)
def test_token_by_token_gives_what_one_chunk_gives(text: str, stop: list[str]) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text)
    # Where decoding stops: the first token that completes a stop string.
    ids = next((ids[:n] for n in range(1, len(ids)) if any(s in known(ids[:n]) for s in stop)), ids)
    single, whole = TextStream(tokenizer, [], stop), TextStream(tokenizer, [], stop)
    for n, token in enumerate(ids, 1):
        push(single, [token], n == len(ids))
    push(whole, ids, True)
    assert single.text == whole.text


def test_pieces_carry_the_origin_of_the_token_that_completed_them() -> None:
    tokenizer = tiny_tokenizer()
    letters, smile = tokenizer.encode("x"), tokenizer.encode("\U0001f600")
    assert len(smile) == 4
    stream = TextStream(tokenizer, [])
    assert stream.push(letters + smile[:2], ["draft"] * 3, False) == [("x", "draft")]
    assert stream.push(smile[2:] + letters, ["lookup", "bonus", "draft"], False) == [
        ("\U0001f600", "bonus"),
        ("x", "draft"),
    ]


def test_a_false_alarm_is_released_with_its_origins() -> None:
    tokenizer = tiny_tokenizer()
    stream = TextStream(tokenizer, [], ["xyz"])
    x, y, q = (tokenizer.encode(letter) for letter in "xyq")
    assert stream.push(x, ["draft"], False) == []
    assert stream.push(y, ["bonus"], False) == []
    assert stream.push(q, ["draft"], False) == [("x", "draft"), ("y", "bonus"), ("q", "draft")]
    # At the end, half a stop string is text.
    assert stream.push(x + y, ["draft"] * 2, True) == [("x", "draft"), ("y", "draft")]


def test_a_broken_character_comes_out_at_the_end() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("a\u6f22")[:-1]
    stream = TextStream(tokenizer, [])
    assert push(stream, ids[:-1], False) == "a"
    push(stream, ids[-1:], True)
    assert stream.text == tokenizer.decode(ids) and ODD in stream.text


@pytest.mark.parametrize("split", [1, 2])
def test_a_prompt_that_ends_inside_a_character(split: int) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("\u6f22")
    stream = TextStream(tokenizer, tokenizer.encode("ab") + ids[:split])
    push(stream, [*ids[split:], *tokenizer.encode("ab")], True)
    assert stream.text.endswith("ab") and stream.text.strip(ODD) == "ab"


def test_the_end_token_is_no_text() -> None:
    tokenizer = tiny_tokenizer()
    stream = TextStream(tokenizer, [])
    assert push(stream, [*tokenizer.encode("ab"), tokenizer.eos_token_id], True) == "ab"
