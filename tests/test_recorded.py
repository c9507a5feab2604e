"""Forwards at fixed shapes give what the others give: here as they are, as graphs where there is a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from toys import CONTEXT, VOCAB, noisy_copy, random_head, random_tree, tiny
from transformers import PreTrainedModel

from forerun.api import Decoder
from forerun.draft import Draft
from forerun.loading import load_head
from forerun.methods import method
from forerun.model import CausalLM
from forerun.runtime import lean, recorded
from forerun.runtime.hidden import HiddenLM
from forerun.runtime.lean import lean_forward
from forerun.runtime.recorded import Recorded

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
PROMPTS = [[5, 9, 3, 7], [8, 2], [4], [6, 6, 1, 2, 3, 4, 5, 6, 6]]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "STEP", 8)  # so that buffers grow and shapes change


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
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]
    for lm in (plain, quick):
        lm.keeps_hidden = True
        lm.start(prompts)
    for turn in range(3):
        count = len(plain.cache.lengths)
        steps = [[Draft.chain(5, [6, 7, 8])] * count, [Draft.root(9)] * count]
        steps += [[random_tree(9, VOCAB, generator) for _ in range(count)]]
        steps += [[Draft.chain(3, [4, 5]) if row else Draft.root(1) for row in range(count)]]
        for drafts in steps:
            for a, b in zip(plain.forward(drafts), quick.forward(drafts), strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
            assert plain.hidden is not None and quick.hidden is not None
            for row, draft in enumerate(drafts):
                ours, theirs = quick.hidden[row, : len(draft)], plain.hidden[row, : len(draft)]
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
            paths = [draft.path(row % len(draft)) for row, draft in enumerate(drafts)]
            for lm in (plain, quick):
                lm.commit(paths)
        shorter = [length - 1 - row % 2 for row, length in enumerate(plain.cache.lengths)]
        for lm in (plain, quick):
            lm.crop(shorter)
            if turn and count > 1:
                lm.keep([row for row in range(count) if row != 1])
    assert isinstance(quick.recorded, Recorded) and quick.recorded.shapes


@pytest.mark.parametrize("device", DEVICES)
def test_rolling_on_over_fixed_shapes_is_the_same(device: str) -> None:
    model = llama(device)
    plain, quick = CausalLM(model), replayed(model)
    for chains in ([[3, 4], [5], []], [[7]]):
        found = []
        for lm in (plain, quick):
            lm.keeps_hidden = True
            lm.start([[1, 2, 3], [4] * 6, [5]][: len(chains)])
            found.append(lm.roll(chains, 9, VOCAB))
        (ours, logits, hidden), (theirs, wanted, states) = found
        rows = [row for row, chain in enumerate(chains) if chain]
        assert ours[rows].tolist() == theirs[rows].tolist() and plain.cache.lengths == quick.cache.lengths
        for parts in ((logits, wanted), (hidden, states)):
            for a, b in zip(*parts, strict=True):
                torch.testing.assert_close(a[rows], b[rows], atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_is_not_waited_for() -> None:
    model = llama("cuda")
    quick = replayed(model)
    lyanna = HiddenLM(load_head(random_head(CausalLM(model)), quick), quick)
    state = torch.zeros(1, lyanna.width, device="cuda")
    lyanna.start(1)
    lyanna.extend([state.repeat(3, 1)], [[1, 2, 3]])
    quick.start([[1, 2, 3]])
    for strict in (False, True):  # shapes are recorded first
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            quick.roll([[3, 4]], 3, VOCAB)
            lyanna.roll(state, 3, [0])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        quick.crop([3])
        lyanna.crop([3])


def test_sixteen_bits_are_near_the_stock_forward() -> None:
    model = llama("cpu").to(torch.bfloat16)  # type: ignore[arg-type]
    plain, quick = CausalLM(model), replayed(model)
    for lm in (plain, quick):
        lm.keeps_hidden = True
        lm.start([[5, 9, 3, 7, 7, 2]])
    for chain in ([4], [1, 2, 3]):
        ours, theirs = (lm.extend([chain])[0].float() for lm in (quick, plain))
        assert (ours - theirs).abs().max() < 0.03 * theirs.abs().max()
        assert quick.hidden is not None and plain.hidden is not None
        assert (quick.hidden - plain.hidden).abs().max() < 0.03 * plain.hidden.abs().max()


WAYS: dict[str, dict[str, Any]] = {
    "ar": {},
    "sd": {"gamma": 3},
    "lookup": {},
    "ouroboros": {"gamma": 4, "window": 2},
    "lyanna": {"depth": 4},
    "eagle": {"depth": 3, "width": 2, "nodes": 7},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", WAYS)
def test_decoding_over_fixed_shapes_says_the_same(name: str, device: str) -> None:
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
