"""Forwards at fixed shapes give what the others give: here as they are, as graphs where there is a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from joining import join_all
from toys import CONTEXT, VOCAB, noisy_copy, random_head, random_tree, tiny
from transformers import PreTrainedModel

from forerun.api.layers import load_head
from forerun.api.load import Decoder
from forerun.backends import lean, recorded
from forerun.backends.heads import HiddenLM
from forerun.backends.lean import lean_forward
from forerun.backends.recorded import Recorded
from forerun.engine.draft import Draft
from forerun.methods import method
from forerun.model import kv_cache as cache_module
from forerun.model.causal_lm import CausalLM

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
PROMPTS = [[5, 9, 3, 7], [8, 2], [4], [6, 6, 1, 2, 3, 4, 5, 6, 6]]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "STEP", 8)  # so that buffers grow and shapes change
    monkeypatch.setattr(cache_module, "BLOCK", 8)


def replayed(model: PreTrainedModel) -> CausalLM:
    forward = lean_forward(model)
    assert forward is not None
    lm = CausalLM(model, forward)
    lm.recorded = Recorded(forward)
    return lm


def llama(device: str, seed: int = 0) -> PreTrainedModel:
    return tiny("llama", seed).to(device)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("folding", [(), ("cpu", "cuda")])
@pytest.mark.parametrize("lengths", [[9], [0], [7, 7, 7], [3, 12, 1, 30]])
def test_fixed_shapes_equal_the_stock_forward(
    lengths: list[int], folding: tuple[str, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lean, "FOLDING", folding)
    model = llama(device)
    assert model.config.num_attention_heads > model.config.num_key_value_heads
    plain, quick = CausalLM(model), replayed(model)
    generator = torch.Generator().manual_seed(len(lengths))
    prompts = {3 * i: torch.randint(VOCAB, (n,), generator=generator).tolist() for i, n in enumerate(lengths)}
    for lm in (plain, quick):
        lm.keeps_hidden = lm.keeps_prompt = True
        join_all(lm, prompts, reserve=20)
    ids = list(prompts)
    for turn in range(3):
        count = len(ids)
        steps = [[Draft.chain(5, [6, 7, 8])] * count, [Draft.root(9)] * count]
        steps += [[random_tree(9, VOCAB, generator) for _ in range(count)]]
        steps += [[Draft.chain(3, [4, 5]) if row else Draft.root(1) for row in range(count)]]
        steps += [[random_tree(5, VOCAB, generator)] * max(1, count - 1)]  # the others stay as they are
        for drafts in steps:
            some = ids[count - len(drafts) :] if turn else ids[: len(drafts)]
            for a, b in zip(plain.forward(some, drafts), quick.forward(some, drafts), strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
            assert plain.hidden is not None and quick.hidden is not None
            for ours, theirs in zip(quick.hidden, plain.hidden, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
            paths = [draft.path(row % len(draft)) for row, draft in enumerate(drafts)]
            for lm in (plain, quick):
                lm.commit(some, paths)
        shorter = [plain.length(id) - 1 - row % 2 for row, id in enumerate(ids)]
        for lm in (plain, quick):
            lm.crop(ids, shorter)
            if turn and count > 1:
                lm.drop(ids[1])
        ids = [ids[0], *ids[2:]] if turn else ids[::-1]
    assert isinstance(quick.recorded, Recorded) and quick.recorded.shapes
    assert {key[0] for key in quick.recorded.shapes} <= {1, 2, 4, 8}


@pytest.mark.parametrize("device", DEVICES)
def test_shapes_are_few_and_last_while_buffers_stay(device: str) -> None:
    lm = replayed(llama(device))
    join_all(lm, {id: [1, 2, 3] for id in range(7)}, reserve=30)
    for count in (1, 3, 4, 2, 7, 5, 6):
        for size in (7, 8):
            ids = list(range(count))
            lm.extend(ids, [[4] * size] * count)
            lm.crop(ids, [3] * count)
    first = dict(lm.recorded.shapes)
    assert {(key[0], key[1]) for key in first} == {(rows, 8) for rows in (1, 2, 4, 8)}
    for count in (1, 2, 5):
        lm.extend(list(range(count)), [[4] * 8] * count)
        lm.crop(list(range(count)), [3] * count)
    assert lm.recorded.shapes == first
    lm.add(9, 50)  # buffers move
    lm.extend([0], [[4] * 8])
    assert len(lm.recorded.shapes) == 1
    other = lm.fresh()
    assert other.recorded is not lm.recorded and not other.recorded.shapes


@pytest.mark.parametrize("device", DEVICES)
def test_rolling_on_over_fixed_shapes_is_the_same(device: str) -> None:
    model = llama(device)
    plain, quick = CausalLM(model), replayed(model)
    for ids, chains in (([2, 0], [[3, 4], [5]]), ([0, 1, 2], [[3], [4], [5]]), ([1], [[7]])):
        found = []
        for lm in (plain, quick):
            lm.reset()
            lm.keeps_hidden = lm.keeps_prompt = True
            join_all(lm, dict(enumerate([[1, 2, 3], [4] * 6, [5]])))
            lm.extend([1], [[9]])
            found.append(lm.roll(ids, chains, 9, VOCAB))
        (ours, logits, hidden), (theirs, wanted, states) = found
        assert ours.tolist() == theirs.tolist() and plain.cache.lengths == quick.cache.lengths
        for parts in ((logits, wanted), (hidden, states)):
            for a, b in zip(*parts, strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_is_not_waited_for() -> None:
    model = llama("cuda")
    quick = replayed(model)
    lyanna = HiddenLM(load_head(random_head(CausalLM(model)), quick), quick)
    state = torch.zeros(1, lyanna.width, device="cuda")
    lyanna.add(0, 20)
    lyanna.extend([0], [state.repeat(3, 1)], [[1, 2, 3]])
    join_all(quick, {0: [1, 2, 3]}, reserve=20)
    quick.extend([0], [[4]])
    quick.crop([0], [3])
    for strict in (False, True):  # shapes are recorded first
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            quick.roll([0], [[3, 4]], 3, VOCAB)
            lyanna.roll([0], state, 3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        quick.crop([0], [3])
        lyanna.crop([0], [3])


def test_sixteen_bits_are_near_the_stock_forward() -> None:
    model = llama("cpu").to(torch.bfloat16)  # type: ignore[arg-type]
    plain, quick = CausalLM(model), replayed(model)
    for lm in (plain, quick):
        lm.keeps_hidden = lm.keeps_prompt = True
        join_all(lm, {0: [5, 9, 3, 7, 7, 2]})
    for chain in ([4], [1, 2, 3]):
        ours, theirs = (lm.extend([0], [chain])[0].float() for lm in (quick, plain))
        assert (ours - theirs).abs().max() < 0.03 * theirs.abs().max()
        assert quick.hidden is not None and plain.hidden is not None
        assert (quick.hidden[0] - plain.hidden[0]).abs().max() < 0.03 * plain.hidden[0].abs().max()


WAYS: dict[str, dict[str, Any]] = {
    "ar": {},
    "sd": {"gamma": 3},
    "suffix": {},
    "ouroboros": {"gamma": 4, "window": 2},
    "lyanna": {"depth": 4},
    "eagle": {"depth": 3, "width": 2, "nodes": 7},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", WAYS)
def test_decoding_over_fixed_shapes_gives_the_same_tokens(name: str, device: str) -> None:
    target, draft, chosen = llama(device), noisy_copy(llama(device), 0.02), method(name, **WAYS[name])
    head = random_head(CausalLM(target), kind=chosen.head) if chosen.head else None
    drafting = replayed(draft) if chosen.needs_draft else None
    decoder = Decoder(replayed(target), None, drafting, chosen, guard=False, head=head)
    plain = Decoder(CausalLM(target), method=method("ar"))
    asked: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    for prompts in (PROMPTS[:1], PROMPTS, PROMPTS[1:]):
        wanted = [row.tokens for row in plain.generate(prompts, **asked)]
        assert [row.tokens for row in decoder.generate(prompts, **asked)] == wanted
    longest = [[3] * (CONTEXT - 12)]
    assert decoder.generate(longest, **asked)[0].tokens == plain.generate(longest, **asked)[0].tokens


@pytest.mark.parametrize("device", DEVICES)
def test_two_generations_under_way_do_not_meet(device: str) -> None:
    target = llama(device)
    decoder = Decoder(replayed(target), None, replayed(noisy_copy(llama(device), 0.02)), method("sd"), guard=False)
    plain = Decoder(CausalLM(target), method=method("ar"))

    def tokens(parts: Sequence[Any]) -> list[int]:
        return [token for part in parts for token in part.step.tokens]

    asked: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
    streams = [iter(decoder.stream(prompt, **asked)) for prompt in PROMPTS[:2]]
    parts: list[list[Any]] = [[], []]
    for turn in range(60):
        part = next(streams[turn % 2], None)
        if part is not None:
            parts[turn % 2].append(part)
    assert [tokens(each) for each in parts] == [plain.generate(prompt, **asked).tokens for prompt in PROMPTS[:2]]
