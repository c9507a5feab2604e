"""Drafts that give logits to a part of the vocabulary only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import LogitsProcessorList, TemperatureLogitsWarper

import forerun
from forerun import Decoder
from forerun.backends.hot import HotHead, hot_tokens, prepare_draft, save_hot
from forerun.backends.stored import store
from forerun.methods import method
from forerun.model.causal_lm import CausalLM
from forerun.zoo import HOT_FILE, WEIGHTS_FOLDER, ModelSource
from tests.support import families
from tests.support.toys import (
    COSTS,
    joint_distribution,
    noisy_copy,
    p_value,
    random_layer,
    refuses,
    rows_of,
    save_models,
    tiny,
)

PROMPTS = [[1, 2, 3, 9, 2], [30, 31, 4], [7]]


def hot(model: CausalLM, tokens: list[int]) -> CausalLM:
    head = model.head.get_parameter("weight").detach().clone()
    return model.fresh().draft_with(HotHead(rows_of(head), len(head), torch.tensor(tokens)), None)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_logits_are_those_of_the_hot_tokens_and_of_the_text(architecture: str) -> None:
    whole = CausalLM(tiny(architecture))
    part = hot(whole, [5, 1, 3])
    for model in (whole, part):
        list(model.prefill([1, 9], 8))
        model.join(0)
        model.add(1)
    wanted = whole.extend([1, 0], [[4, 5], [7]])
    logits = part.extend([1, 0], [[4, 5], [7]])
    kept = [{5, 1, 3, 4}, {5, 1, 3, 9, 7}]
    caps = architecture == "gemma2"  # its logits are capped, a hot head's are not
    for row, tokens in enumerate(kept):
        there = torch.zeros(whole.vocab_size, dtype=torch.bool).index_fill_(
            0, torch.tensor(sorted(tokens)), True
        )
        assert torch.isinf(logits[row][:, ~there]).all()
        if not caps:
            assert torch.allclose(logits[row][:, there], wanted[row][:, there], atol=2e-2)
        assert (
            logits[row].argmax(-1).tolist()
            == wanted[row].masked_fill(~there, -torch.inf).argmax(-1).tolist()
        )
    part.drop(0)
    part.add(0)
    assert torch.isinf(part.extend([0], [[2]])[0][:, [9, 7]]).all()  # another text


@pytest.mark.parametrize(
    ("name", "setting"), [("Granite", {"logits_scaling": 4.0}), ("Cohere", {"logit_scale": 0.25})]
)
def test_a_models_own_scale_of_logits_is_kept(name: str, setting: dict[str, float]) -> None:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = getattr(transformers, f"{name}Config")(
        vocab_size=60, intermediate_size=48, **sizes, **setting
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    whole = CausalLM(model)
    part = prepare_draft(model, None, 20, fast=False)
    for each in (whole, part):
        each.add(0)
    wanted, found = (each.extend([0], [[4, 5]])[0] for each in (whole, part))
    assert torch.allclose(found[:, :20], wanted[:, :20], atol=1e-2)


def test_int8_drafts_have_a_hot_head_too_and_a_row_its_bits_beside_others() -> None:
    whole = CausalLM(families.tiny("llama"))
    model = prepare_draft(store(families.tiny("llama"), "int8"), "somewhere", 12)
    for each in (whole, model):
        each.add(0)
    (full,), (alone,) = (each.extend([0], [[4, 38]]) for each in (whole, model))
    kept = [*range(12), 38]
    assert torch.allclose(alone[:, kept], full[:, kept], atol=0.1 * float(full.abs().max()))
    assert int(torch.isfinite(alone).sum()) == 2 * len(kept)
    beside = model.fresh()
    beside.add(0)
    beside.add(1)
    assert torch.equal(beside.extend([0, 1], [[4, 38], [31, 32]])[0], alone)
    assert torch.isinf(beside.extend([0], [[5]])[0][:, [31, 32]]).all()


@pytest.mark.parametrize("name", ["sd", "pacer", "ouroboros", "cumulative"])
def test_greedy_output_is_the_targets(name: str) -> None:
    target = tiny("llama")
    wanted = Decoder(target, None, None, method("ar"), False).generate(
        PROMPTS, max_new_tokens=30, ignore_eos=True
    )
    draft = hot(CausalLM(noisy_copy(target, 0.01)), list(range(0, 60, 2)))
    if name == "pacer":
        layer = random_layer(target, noisy_copy(target, 0.01))
        decoder = Decoder(
            target, None, draft, method(name, threshold=0.2), False, pre_verifier=layer
        )
    else:
        decoder = Decoder(target, None, draft, method(name), False)
    rows = decoder.generate(PROMPTS, max_new_tokens=30, ignore_eos=True)
    assert [row.tokens for row in rows] == [row.tokens for row in wanted]
    assert sum(row.stats.accepted for row in rows) > 0  # the draft was of use


def test_tokens_of_the_text_are_drafted() -> None:
    """Without them a draft whose hot tokens never come would be of no use."""
    target = tiny("llama")
    plain = Decoder(target, None, None, method("ar"), False)
    (row,) = plain.generate([PROMPTS[0]], max_new_tokens=60, ignore_eos=True)
    text = [*PROMPTS[0], *row.tokens]
    never = [token for token in range(plain.target.vocab_size) if token not in text][:4]
    taus = []
    for meets in (True, False):
        draft = hot(CausalLM(target), never)
        if not meets:
            draft.hot.add_context_tokens = lambda id, tokens: None
        found = Decoder(target, None, draft, method("sd", gamma=3), False)
        found.draft.fresh = lambda *_, draft=draft: draft  # type: ignore[union-attr]
        (again,) = found.generate([text], max_new_tokens=40, ignore_eos=True)
        taus.append(again.stats.tau)
    assert taus[0] > taus[1] == 1.0


@pytest.mark.slow
def test_sampled_output_follows_the_targets_distribution() -> None:
    target = tiny("llama", vocab=6)
    draft = hot(CausalLM(noisy_copy(target, 0.05)), [0, 4])
    decoder = Decoder(target, None, draft, method("sd", gamma=2), False, max_rows=250, costs=COSTS)
    decoder.engine.limits.chunk_seconds = 100.0  # no clock says who joins when
    torch.manual_seed(3)
    rows = decoder.generate([[1, 2, 3]] * 900, max_new_tokens=3, temperature=1.3, ignore_eos=True)
    wanted = joint_distribution(
        target, [1, 2, 3], 2, LogitsProcessorList([TemperatureLogitsWarper(1.3)])
    )
    assert p_value([row.tokens[:2] for row in rows], wanted) > 1e-4


def test_which_tokens_are_hot(tmp_path: Path) -> None:
    assert hot_tokens(None, None, 10) is None and hot_tokens(tmp_path, 0, 10) is None
    assert hot_tokens(tmp_path, 3, 10).tolist() == [0, 1, 2]  # type: ignore[union-attr]
    save_hot(tmp_path, torch.tensor([7, 2, 5]))
    for count, wanted in (
        (None, [7, 2, 5]),
        (2, [7, 2]),
        (5, [7, 2, 5, 0, 1]),
        (10, [7, 2, 5, 0, 1, 3, 4, 6, 8, 9]),
    ):
        assert hot_tokens(tmp_path, count, 10).tolist() == wanted  # type: ignore[union-attr]
    assert hot_tokens(tmp_path, 0, 10) is None
    refuses("draft_vocabulary must be 0 to 10, not 11", hot_tokens, tmp_path, 11, 10)
    refuses("must hold token ids from 0 to 6", hot_tokens, tmp_path, None, 7)
    (tmp_path / HOT_FILE).write_bytes(b"what is this")
    refuses("holds no hot tokens", hot_tokens, tmp_path, None, 10)


@pytest.mark.slow
def test_a_folder_that_names_its_hot_tokens(tmp_path: Path) -> None:
    save_models(tmp_path, target=tiny("llama", vocab=300), draft=tiny("llama", vocab=300))
    save_hot(tmp_path / "draft", torch.arange(20))
    folders = {"target": tmp_path / "target", "draft": tmp_path / "draft"}
    for options, hot_count in (
        ({}, 20),
        ({"draft_vocabulary": 9}, 9),
        ({"draft_vocabulary": 0}, None),
    ):
        decoder = forerun.load(**folders, method="sd", guard=False, **options)  # type: ignore[arg-type]
        assert decoder.draft is not None
        assert (decoder.draft.hot is None) == (hot_count is None)
        assert hot_count is None or len(decoder.draft.hot.tokens) == hot_count
        plain = forerun.load(tmp_path / "target", method="ar")
        asked = {"max_new_tokens": 20, "ignore_eos": True}
        (row,), (wanted,) = (each.generate([PROMPTS[0]], **asked) for each in (decoder, plain))
        assert row.tokens == wanted.tokens
    refuses(
        "draft_vocabulary must be at least 0, not -1", forerun.load, **folders, draft_vocabulary=-1
    )


def test_the_hot_tokens_of_a_fetched_draft_come_with_forerun() -> None:
    folder = ModelSource.parse("qwen-coder-draft", "draft").hot_folder
    assert folder is not None
    tokens = hot_tokens(folder, None, 151_936)
    assert tokens is not None and len(tokens) == 16384
    assert (
        ModelSource.parse("smollm2", "draft").hot_folder == WEIGHTS_FOLDER / "smollm2" / "draft"
    )  # in few bits, with its own list


@pytest.mark.parametrize("kind", [None, "int8", "bfloat16"])
def test_a_hot_head_keeps_no_whole_head(kind: str | None) -> None:
    model = tiny("llama", vocab=4096)
    part = prepare_draft(model if kind is None else store(model, kind), None, 12)
    held = [each for each in vars(part.hot).values() if isinstance(each, torch.Tensor)]
    assert held and all(each.numel() <= 12 for each in held)
