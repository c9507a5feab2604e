"""Prefill, joining and the prefix store.

Logits are those of a run alone, and what is known is not run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.backends import prepare
from forerun.model.buffers import can_reserve
from forerun.model.causal_lm import CausalLM
from forerun.model.eager import capture_hidden_states
from forerun.model.prefix_store import PrefixStore, Text, common
from tests.support.toys import VOCAB, extend, random_tree, tiny

HALF = [5, 9, 3, 7, 7, 2, 11, 60, 4, 8]


def stored(length: int, fill: float = 0.0) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """KV of `length` positions, 16 bytes each; the second layer has none."""
    return [(torch.full((1, length, 2), fill), torch.full((1, length, 2), fill)), None]


def texts(store: PrefixStore) -> list[list[int]]:
    return [entry.tokens.tolist() for entry in store._entries]


def test_the_longest_common_prefix_is_found() -> None:
    store = PrefixStore(10_000)
    for fill, text in enumerate(([1, 2, 3, 4], [1, 2, 7, 7, 7], [2, 2])):
        store.put(Text(text), stored(len(text), fill))
    found = store.find([1, 2, 7, 9])
    assert found is not None
    entry, length = found
    assert length == 3 and entry.stored[0][0][0, 0, 0] == 1 and entry.stored[1] is None
    assert (
        store.find([1, 2, 7, 9], held=3) is None
        and store.find([3, 1]) is None
        and store.find([]) is None
    )
    assert (store.hits, store.hit_tokens) == (1, 3)
    assert store.find([1, 2, 3], held=1)[1] == 3 and store.hit_tokens == 5


def test_hidden_states_are_part_of_a_hit_where_they_are_wanted() -> None:
    store = PrefixStore(10_000)
    store.put(Text([1, 2, 3]), stored(3))
    assert store.find([1, 2], capture="head") is None
    store.put(
        Text([1, 2], torch.ones(2, 4)), stored(2)
    )  # shorter, but with what the longer one lacks
    assert store.find([1, 2, 3], capture="head")[1] == 2 and store.find([1, 2, 3])[1] == 3
    store.put(Text([1, 2, 3, 4], torch.ones(4, 4)), stored(4))
    assert texts(store) == [[1, 2, 3, 4]] and store.bytes == 4 * 32


def test_the_least_recently_used_goes_first() -> None:
    store = PrefixStore(16 * 10)
    for text in ([1] * 4, [2] * 4):
        store.put(Text(text), stored(4))
    store.find([1, 1])
    store.put(Text([3] * 3), stored(3))
    assert texts(store) == [[1] * 4, [3] * 3] and store.bytes == 16 * 7
    store.put(Text([4] * 11), stored(11))  # too large for all of it: nothing has to go
    assert texts(store) == [[1] * 4, [3] * 3]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=20), st.integers(1, 20)
)
def test_a_store_holds_no_more_than_its_limit_and_finds_the_best(
    puts: list[list[int]], most: int
) -> None:
    store = PrefixStore(16 * most)
    for text in puts:
        store.put(Text(text), stored(len(text)))
        held = texts(store)
        assert store.bytes == 16 * sum(map(len, held)) <= store.limit
        assert not any(one != other and one == other[: len(one)] for one in held for other in held)
        assert len(text) > most or held[-1][: len(text)] == text
        longest = max((common(each, text[1:]) for each in held), default=0)
        found = store.find(text[1:])
        assert (found[1] if found else 0) == longest


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_common_counts_equal_first_tokens(one: list[int], other: list[int]) -> None:
    expected = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    assert (
        common(one, other)
        == common(np.array(one, dtype=np.int64), np.array(other, dtype=np.int64))
        == expected
    )


@cache
def model(architecture: str):
    return tiny(architecture)


def prefilled(lm: CausalLM, prompt: Sequence[int], chunk: int = 512, capture: Any = "") -> int:
    return sum(lm.prefill(prompt, chunk, capture=capture))


@torch.inference_mode()
def alone(lm: CausalLM, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V] and the LM head's inputs [n, d] of a text run alone, in one go."""
    with capture_hidden_states(lm.model) as captured:
        logits = lm.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits, captured[0][0]


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "gemma4", "deepseek_v3"])
@pytest.mark.parametrize("is_fast", [False, True])
def test_what_is_known_of_a_prompt_is_not_run_again(
    architecture: str, hidden: bool, is_fast: bool
) -> None:
    plain = CausalLM(model(architecture))
    lm = (prepare(model(architecture)) if is_fast else plain).fresh(prefix_bytes=10**6)
    capture: Any = "head" if hidden else ""
    run = partial(prefilled, lm, capture=capture)
    first, second = [*HALF, 1, 2, 3], [*HALF, 4, 5]
    assert run(first, 4) == len(first)
    lm.join(1)
    assert run(first) == 0  # several sequences of one prompt
    lm.join(2)
    assert run(second) == 2
    lm.join(3)
    lm.forget_prompt()
    assert run([*first, 7]) == 1 and lm.prompts.store.hits == 1  # saved when its prefill ended
    lm.join(4)
    # A finished row is saved with what it generated.
    parts = [lm.prompt_hidden] if hidden else []
    parts += extend(lm, [4], [[8, 8, 9]], capture).hidden or []
    lm.save_prefix(4, [*first, 7, 8, 8, 9, 6], torch.cat(parts) if hidden else None, "", capture)
    lm.drop(4)
    lm.forget_prompt()
    assert run([*first, 7, 8, 8, 1]) == 1
    lm.join(5)
    wanted = {1: first, 2: first, 3: second, 5: [*first, 7, 8, 8, 1]}
    logits = lm.extend(list(wanted), [[6, 5]] * 4)
    for id, found in zip(wanted, logits, strict=True):
        expected, states = alone(plain, [*wanted[id], 6, 5])
        torch.testing.assert_close(found, expected[-2:], atol=1e-4, rtol=1e-4)
    if hidden:
        torch.testing.assert_close(lm.prompt_hidden, states[:-2], atol=1e-4, rtol=1e-4)
    assert lm.prefilled == len(first) + 2 + 1 + 1


def test_a_hit_without_hidden_states_is_none_where_they_are_wanted() -> None:
    lm = CausalLM(model("llama")).fresh(prefix_bytes=10**6)
    assert prefilled(lm, HALF) == len(HALF)
    lm.forget_prompt()
    assert prefilled(lm, HALF, capture="head") == len(HALF)
    lm.join(3)
    lm.save_prefix(3, HALF)  # without them: what is there stays
    lm.forget_prompt()
    assert prefilled(lm, HALF, capture="head") == 0 and lm.prompt_hidden.shape == (len(HALF), 32)


def test_a_prefill_that_is_given_up_leaves_a_usable_prompt_cache() -> None:
    lm = CausalLM(model("llama"))
    begun = lm.prefill(HALF, 3, capture="head")
    next(begun)
    begun.close()
    assert prefilled(lm, [*HALF[:8], 1], capture="head") == 6  # three are known
    lm.join(1)
    torch.testing.assert_close(lm.prompt_hidden, alone(lm, [*HALF[:8], 1])[1], atol=1e-4, rtol=1e-4)
    assert prefilled(lm, [], capture="head") == 0 and lm.prompt_hidden.shape == (0, 32)
    lm.join(2)
    assert (lm.length(1), lm.length(2)) == (9, 0)


@contextmanager
def long_texts(moved_bytes: int = 1) -> Iterator[None]:
    """Every text is long enough to move to its row, and every buffer a mapping.

    Pages move where they hold `moved_bytes`, and fewer entries are copied.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.model.prompts.LONG", 1)
        patch.setattr("forerun.model.buffers.MAPPED", 1)
        patch.setattr("forerun.model.buffers.MOVED_PAGES", moved_bytes)
        yield


@pytest.mark.skipif(not can_reserve(), reason="prompts are copied here")
@pytest.mark.parametrize("prefix_bytes", [0, 10**6])
def test_a_long_prompt_moves_to_its_row_and_is_known_there(prefix_bytes: int) -> None:
    lm = CausalLM(model("llama")).fresh(prefix_bytes)
    with long_texts():
        assert prefilled(lm, HALF) == len(HALF)
        lm.join(1)
        assert lm.prompts.cache.lengths == [0] and not any(
            each.keys.any() for each in lm.prompts.cache.layers
        )
        lm.join(2)  # copied from the first row
        assert (
            prefilled(lm, [*HALF[:6], 1, 2]) == 2
        )  # what it shares with the row is copied from there
        lm.join(3)
        for id in (1, 3):
            lm.drop(id)
        assert (
            prefilled(lm, [*HALF[:6], 1, 2, 3]) == 1
        )  # the row's entries have come back, or the store has them
        lm.join(4)
        lm.crop([4], [3])  # as a draft with another tokenizer may
        assert prefilled(lm, [*HALF[:5], 60]) == (3 if not prefix_bytes else 1)
        lm.join(5)
        texts = {2: HALF, 4: HALF[:3], 5: [*HALF[:5], 60]}
        for id, logits in zip(texts, lm.extend(list(texts), [[6, 5]] * 3), strict=True):
            expected, _ = alone(lm, [*texts[id], 6, 5])
            torch.testing.assert_close(logits, expected[-2:], atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not can_reserve(), reason="prompts are copied here")
@torch.inference_mode()
def test_a_moved_prompt_that_is_not_finite_is_run_again() -> None:
    lm = CausalLM(model("llama"))
    with long_texts():
        prefilled(lm, HALF)
        lm.join(1)
        lm.cache.layers[0].values[0, 0, 2] = torch.nan
        assert prefilled(lm, HALF) == len(HALF)
        lm.drop(1)
        assert not lm.cache.layers[0].values.isnan().any()


def sizes(lm: CausalLM, prompt: Sequence[int]) -> list[int]:
    """Run a prompt, and return what `prefill` yields."""
    return list(lm.prefill(prompt, 512))


def test_layers_of_long_texts_are_copied_one_at_a_time() -> None:
    lm = CausalLM(model("llama")).fresh(prefix_bytes=10**6)
    layers = len(lm.cache.layers)
    assert sizes(lm, HALF) == [len(HALF)]  # a short one
    with long_texts():
        assert sizes(lm, [*HALF, 1]) == [1] + 2 * layers * [0]  # looked at and copied to the store
        lm.forget_prompt()
        assert sizes(lm, [*HALF, 1]) == 2 * layers * [0]  # copied from the store and looked at
        lm.join(1)
    logits = lm.extend([1], [[6, 5]])[0]
    expected, _ = alone(lm, [*HALF, 1, 6, 5])
    torch.testing.assert_close(logits, expected[-2:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pieces", range(1, 9))
def test_a_reading_that_is_given_up_between_two_layers_harms_no_other(pieces: int) -> None:
    lm = CausalLM(model("llama")).fresh(prefix_bytes=10**6)
    with long_texts():
        prefilled(lm, HALF)
        lm.forget_prompt()
        begun = lm.prefill([*HALF, 1], 512)
        for _, _ in zip(range(pieces), begun, strict=False):
            pass
        begun.close()
        for id, text in enumerate(([*HALF[:4], 2], [*HALF, 1, 2])):
            prefilled(lm, text)
            lm.join(id)
            logits = lm.extend([id], [[6, 5]])[0]
            expected, _ = alone(lm, [*text, 6, 5])
            torch.testing.assert_close(logits, expected[-2:], atol=1e-4, rtol=1e-4)


def test_a_prompt_that_is_being_copied_is_not_forgotten() -> None:
    """As when another prompt fails meanwhile."""
    lm = CausalLM(model("llama")).fresh(prefix_bytes=10**6)
    with long_texts():
        begun = lm.prefill(HALF, 512)
        assert [next(begun) for _ in range(4)] == [len(HALF), 0, 0, 0]
        lm.forget_prompt()
        assert not any(begun)
        lm.join(1)
        lm.forget_prompt()
        assert prefilled(lm, [*HALF, 1]) == 1
        lm.join(2)
    logits = lm.extend([1, 2], [[6, 5]] * 2)
    for answer, text in zip(logits, (HALF, [*HALF, 1]), strict=True):
        expected, _ = alone(lm, [*text, 6, 5])
        torch.testing.assert_close(answer, expected[-2:], atol=1e-4, rtol=1e-4)


def test_a_text_that_would_have_too_many_mappings_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = CausalLM(model("llama")).fresh(prefix_bytes=10**6)
    monkeypatch.setattr("forerun.model.prompts.MAX_MAPPINGS", 1)
    detach = Mock()
    monkeypatch.setattr(lm.prompts, "detach", detach)
    with long_texts():
        prefilled(lm, HALF)
        lm.join(1)
        lm.extend([1], [[8, 8, 9]])
        lm.save_prefix(1, [*HALF, 8, 8, 9])
        lm.drop(1)
        assert prefilled(lm, [*HALF, 8, 8, 9, 1]) == 1
    detach.assert_not_called()


def test_a_short_common_beginning_with_a_long_text_is_copied_at_once() -> None:
    lm = CausalLM(model("llama")).fresh(prefix_bytes=10**6)
    prefilled(lm, HALF)
    lm.forget_prompt()
    (entry,) = lm.prompts.store._entries
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.model.prompts.LONG", entry.bytes // 2)
        assert sizes(lm, [*HALF[:2], 60])[0] == 1


@pytest.mark.skipif(not can_reserve(), reason="texts are copied here")
def test_a_long_text_that_has_ended_is_moved_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = CausalLM(model("llama")).fresh(prefix_bytes=10**6)
    with long_texts():
        prefilled(lm, HALF)
        lm.join(1)
        lm.extend([1], [[8, 8, 9]])
        lm.join(2)
        monkeypatch.setattr(torch.Tensor, "clone", None)  # no copy is made
        lm.save_prefix(1, [*HALF, 8, 8, 9])
        monkeypatch.undo()
        lm.drop(1)
        assert not any(layer.keys[1:].any() for layer in lm.cache.layers)
        assert prefilled(lm, [*HALF, 8, 8, 9, 1]) == 1
        lm.join(3)
        for id, text in ((2, HALF), (3, [*HALF, 8, 8, 9, 1])):
            logits = lm.extend([id], [[6, 5]])[0]
            expected, _ = alone(lm, [*text, 6, 5])
            torch.testing.assert_close(logits, expected[-2:], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=40)
def test_rows_that_join_and_leave_in_any_order_have_the_logits_of_a_run_alone(
    data: st.DataObject,
) -> None:
    moved_bytes = data.draw(st.sampled_from([None, 1, 10**9]), "bytes that move")
    with long_texts(moved_bytes) if moved_bytes else nullcontext():
        _join_and_leave(data)


def _join_and_leave(data: st.DataObject) -> None:
    architecture = data.draw(st.sampled_from(["llama", "qwen3", "mistral", "gemma3"]))
    kind = data.draw(st.sampled_from([CausalLM, prepare]))
    lm = kind(model(architecture)).fresh(data.draw(st.sampled_from([0, 3000, 10**6])))
    capture: Any = data.draw(st.sampled_from(["", "head"]))
    plain = CausalLM(model(architecture))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    rows: dict[int, list[int]] = {}
    for id in range(data.draw(st.integers(2, 7), "calls")):
        prompt = HALF[: data.draw(st.integers(0, 10))] + data.draw(
            st.lists(st.integers(0, VOCAB - 1), max_size=20)
        )
        prefilled(lm, prompt, data.draw(st.integers(1, 16)), capture)
        for copy in range(data.draw(st.integers(1, 2))):
            lm.join(100 * copy + id, data.draw(st.integers(0, 60)))
            rows[100 * copy + id] = list(prompt)
        for _ in range(data.draw(st.integers(0, 2))):
            ids = data.draw(st.lists(st.sampled_from(sorted(rows)), min_size=1, unique=True))
            drafts = [random_tree(data.draw(st.integers(1, 6)), VOCAB, generator) for _ in ids]
            paths = []
            logits, hidden = lm.forward(ids, drafts, capture)
            for id_, draft, node_logits in zip(ids, drafts, logits, strict=True):
                path = draft.path(len(draft) - 1)
                expected, states = alone(plain, rows[id_] + [draft.tokens[node] for node in path])
                torch.testing.assert_close(
                    node_logits[path], expected[-len(path) :], atol=1e-4, rtol=1e-4
                )
                if capture:
                    node_states = hidden[len(paths)]
                    torch.testing.assert_close(
                        node_states[path], states[-len(path) :], atol=1e-4, rtol=1e-4
                    )
                paths.append(path)
            lm.commit(ids, paths)
            for id_, draft, path in zip(ids, drafts, paths, strict=True):
                rows[id_] += [draft.tokens[node] for node in path]
        for id_ in data.draw(st.lists(st.sampled_from(sorted(rows)), max_size=2, unique=True)):
            if data.draw(st.booleans()):
                lm.save_prefix(id_, [*rows[id_], 3])
            lm.drop(id_)
            del rows[id_]
            assert id_ not in lm and lm.length(id_) == 0
        if not rows:
            assert not lm.cache.ids and not lm.cache.lengths
