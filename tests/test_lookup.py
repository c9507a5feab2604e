"""Prompt lookup proposes what stood behind the same tokens before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.lookup import LookupDrafter
from forerun.engine.sequence import Request, Sequence


def proposed(tokens: list[int], room: int = 20, ngram: int = 3) -> list[int]:
    seq = Sequence(Request(tokens, room))
    drafter = LookupDrafter(6, ngram)
    drafter.admit(seq, None, 8)
    return drafter.propose([seq]).drafts[0].tokens[1:]


@pytest.mark.parametrize(
    ("tokens", "room", "draft"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], 20, [4, 5, 6, 7, 8, 9]),
        ([1, 2, 3], 20, []),  # nothing stood here before
        ([1, 2, 9, 4, 2, 7, 1, 2], 20, [9, 4, 2, 7, 1, 2]),  # the longer match, though a shorter one is nearer
        ([5, 1, 5, 2, 5], 20, [2, 5, 2, 5, 2, 5]),  # the later of two matches; what follows is a period
        ([7, 7, 7], 20, [7] * 6),
        ([7, 7, 7], 3, [7, 7]),
        ([7, 7, 7], 1, []),
    ],
)
def test_copies_from_the_latest_longest_match(tokens: list[int], room: int, draft: list[int]) -> None:
    assert proposed(tokens, room) == draft


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 20), st.integers(1, 4))
def test_indexing_token_by_token_equals_indexing_at_once(tokens: list[int], begin: int, ngram: int) -> None:
    """Beside another sequence, which comes and goes."""
    seq, other = Sequence(Request(tokens[:begin], 100), 0), Sequence(Request([3, 2, 1, 0], 9), 1)
    drafter = LookupDrafter(6, ngram)
    drafter.admit(seq, None, 8)
    for count, token in enumerate(tokens[begin:]):
        if count % 3 == 0:
            drafter.admit(other, None, 8)
        drafter.propose([[seq], [other, seq], [seq, other]][count % 3])
        if count % 3 == 2:
            drafter.drop(other)
        seq.tokens.append(token)
    assert drafter.propose([seq]).drafts[0].tokens[1:] == proposed(seq.tokens, ngram=ngram)
    for each in (seq, other):
        drafter.drop(each)
    assert not drafter._of
