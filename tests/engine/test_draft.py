"""Draft trees: structure, masks and merging, over random trees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.engine.draft import Draft


@st.composite
def trees(draw: st.DrawFn, sampled: bool = False) -> Draft:
    """Random trees under root 7 without equal siblings; with `sampled`, the first few nodes are."""
    tokens, parents = [7], [-1]
    for _ in range(draw(st.integers(0, 12))):
        # Few tokens, so that two trees share paths.
        parent = draw(st.integers(0, len(tokens) - 1))
        token = draw(st.integers(0, 2))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    count = draw(st.integers(0, len(tokens) - 1)) if sampled else 0
    return Draft(
        tokens,
        parents,
        torch.rand(count, 8) if count else None,
        [f"o{i}" for i in range(len(tokens))],
    )


def texts(draft: Draft) -> list[tuple[int, ...]]:
    return [tuple(draft.tokens[i] for i in draft.path(node)) for node in range(len(draft))]


@given(trees())
def test_paths_depths_children_and_masks_agree(draft: Draft) -> None:
    for node in range(len(draft)):
        path = draft.path(node)
        assert path[0] == 0 and path[-1] == node
        assert [draft.parents[below] for below in path[1:]] == path[:-1]
        assert draft.depths[node] == len(path) - 1
        assert draft.children[node] == [
            child for child in range(len(draft)) if draft.parents[child] == node
        ]
        assert draft.mask()[node].nonzero().flatten().tolist() == path  # it sees nothing else
    assert draft.is_chain == (sorted(draft.depths) == draft.depths == list(range(len(draft))))
    assert draft.drafted == len(draft) - 1


@given(trees(sampled=True), trees())
def test_merge_is_the_union_of_paths(left: Draft, right: Draft) -> None:
    merged = left.merge(right)
    assert sorted(texts(merged)) == sorted(
        set(texts(left)) | set(texts(right))
    )  # a list: nothing is there twice
    # Distributions belong to nodes by number, so this tree's nodes must stay in front.
    assert merged.tokens[: len(left)] == left.tokens and merged.parents[: len(left)] == left.parents
    assert merged.q is left.q and merged.sampled == left.sampled
    origin = dict(zip(texts(right), right.origins, strict=True)) | dict(
        zip(texts(left), left.origins, strict=True)
    )
    assert merged.origins == [origin[text] for text in texts(merged)]
    for node in range(len(left)):  # own children are tested first
        assert merged.children[node][: len(left.children[node])] == left.children[node]


@given(st.lists(st.integers(0, 9), max_size=8), st.booleans())
def test_a_chain_is_a_path_under_its_root(tokens: list[int], sampled: bool) -> None:
    q = torch.rand(len(tokens), 10) if sampled and tokens else None
    draft = Draft.chain(3, tokens, q, origin="phrase")
    assert (
        draft.is_chain
        and draft.tokens == [3, *tokens]
        and draft.path(len(tokens)) == list(range(len(tokens) + 1))
    )
    assert draft.sampled == (len(tokens) if q is not None else 0)
    assert draft.mask().equal(torch.ones(len(draft), len(draft)).tril().bool())
    assert set(draft.origins[1:]) <= {"phrase"}
    root = Draft.root(3)
    assert (len(root), root.drafted, root.children, root.is_chain) == (1, 0, [[]], True)
    if not draft.sampled:
        assert root.merge(draft).tokens == draft.tokens


@pytest.mark.parametrize(
    ("tokens", "parents", "sampled"),
    [
        ([1, 2], [-1, 1], 0),
        ([1, 2], [-1, -1], 0),
        ([1], [0], 0),
        ([1, 2], [-1], 0),
        ([], [], 0),
        ([1, 2], [-1, 0], 2),
    ],
)
def test_what_is_no_tree_is_refused(tokens: list[int], parents: list[int], sampled: int) -> None:
    with pytest.raises(AssertionError):
        Draft(tokens, parents, torch.rand(sampled, 4) if sampled else None)


def test_only_point_masses_under_the_same_root_can_be_merged_in() -> None:
    drawn = Draft.chain(1, [2], torch.rand(1, 4))
    for other in (drawn, Draft.chain(3, [2])):
        with pytest.raises(AssertionError):
            drawn.merge(other)
