"""EAGLE-3 heads of others.

Their logits are those of the speculators package, the engine drafts accordingly, and what cannot be
read is refused. Tests that need speculators run where it is installed (`.ci/speculators`).
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import forerun
from forerun import Decoder
from forerun.api.layers import load_head
from forerun.api.loading import load_model
from forerun.backends import prepare
from forerun.backends.costs import head_costs
from forerun.backends.heads import HiddenLM
from forerun.backends.quantised import QuantisedForward
from forerun.backends.stored import store
from forerun.drafters.beams import grow, searching
from forerun.drafters.eagle import EagleDrafter
from forerun.engine.draft import Draft
from forerun.engine.engine import Engine
from forerun.engine.sequence import Request
from forerun.engine.step import Proposal
from forerun.heads.eagle3 import Eagle3Head
from forerun.methods import Eagle, Hybrid, Method, PacerEagle, method
from forerun.model.causal_lm import CausalLM
from forerun.model.eager import capture_hidden_states
from forerun.planning.cost_model import Costs
from forerun.sampling.sampler import Sampler
from tests.support.commands import run as run_cli
from tests.support.eagle3_heads import FORMS, Plain, Speculators, save_eagle3
from tests.support.families import MODELS
from tests.support.families import tiny as few_bits
from tests.support.languages import SIZE, VOCAB, cycle, model, moves
from tests.support.toys import (
    COSTS,
    drafts_as_plain,
    drain,
    join_all,
    refuses,
    save_models,
    tiny,
    tiny_tokenizer,
)

TOKENS = [5, 6, 7, 8, 9, 1, 2, 3, 60, 11]
PROMPTS = [[5, 6, 7, 5, 6], [9], list(range(2, 40)), [3, 3, 3]]
CAPTURE = (2, 0, 1)  # as the heads have it: after all layers of a toy, none and one
NEITHER = pytest.mark.skipif(
    find_spec("speculators") is None, reason="speculators is not installed"
)
REFERENCES = [Plain, pytest.param(Speculators, marks=NEITHER)]


def states_of(target: CausalLM, tokens: list[int]) -> Tensor:
    """[n, 3 d], captured in transformers' own forward."""
    with torch.no_grad(), capture_hidden_states(target.model, CAPTURE) as captured:
        target.model(input_ids=torch.tensor([tokens]))
    return torch.cat(captured, -1)[0]


# States of layers.


@pytest.mark.versions
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gemma3", "gpt_oss", "opt"])
def test_captured_states_are_those_of_transformers(architecture: str) -> None:
    model: Any = tiny(architecture)
    with torch.no_grad(), capture_hidden_states(model, CAPTURE) as captured:
        wanted = model(input_ids=torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    assert torch.equal(captured[1], wanted[0]) and torch.equal(captured[2], wanted[1])
    if architecture != "opt":  # which has a projection behind the norm
        norm = model.transformer.ln_f if architecture == "gpt2" else model.model.norm
        torch.testing.assert_close(norm(captured[0]), wanted[2])


@pytest.mark.versions
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "in C"])
def test_states_after_layers_are_those_of_transformers(architecture: str) -> None:
    """The captured states equal those of transformers.

    For a prompt read in chunks, one found in the prefix store, and the nodes of trees in a batch.
    """
    target = prepare(few_bits("llama")) if architecture == "in C" else CausalLM(tiny(architecture))
    assert isinstance(target.backend, QuantisedForward) == (architecture == "in C")
    wanted = states_of(target, TOKENS)
    close = {"rtol": 1e-4, "atol": 1e-4}
    target = target.fresh(2**20)
    for run in (9, 0):
        assert sum(target.prefill(TOKENS[:-1], 4, capture=CAPTURE)) == run
        torch.testing.assert_close(target.prompt_hidden, wanted[:-1], **close)
        target.forget_prompt()
    join_all(target, {3: TOKENS[:7], 8: TOKENS[:2]}, 4, capture=CAPTURE)
    hidden = target.forward(
        [3, 8], [Draft([2, 9, 3, 60], [-1, 0, 0, 2]), Draft.chain(7, [8])], CAPTURE
    ).hidden
    assert hidden is not None
    torch.testing.assert_close(
        hidden[0][[0, 2, 3]], states_of(target, [*TOKENS[:7], 2, 3, 60])[7:], **close
    )
    torch.testing.assert_close(hidden[1], wanted[2:4], **close)
    list(target.prefill([], 4, capture=CAPTURE))
    assert target.prompt_hidden is not None and target.prompt_hidden.shape == (0, wanted.shape[1])


@pytest.mark.parametrize("bits", ["int4", "float32"])
@pytest.mark.parametrize("family", MODELS)
def test_states_in_c_have_the_same_bits_in_any_pieces(family: str, bits: str) -> None:
    """One forward of several blocks gives the same bits as single ones.

    Before the norm, the state after the last layer is what the LM head gets.
    """
    model: Any = few_bits(family)
    target = prepare(model if bits == "float32" else store(model, bits))
    assert isinstance(target.backend, QuantisedForward)
    tokens = np.random.default_rng(0).integers(0, 130, 300).tolist()
    hidden = {}
    for chunk in (300, 7):
        list(target.prefill(tokens, chunk, capture=CAPTURE))
        hidden[chunk] = target.prompt_hidden
        target.forget_prompt()
    assert hidden[7] is not None and torch.equal(hidden[300], hidden[7])
    list(target.prefill(tokens, 300, capture="head"))
    last, first, _ = hidden[7].chunk(3, -1)
    with torch.inference_mode():  # because the states were made in it
        normed = model.model.norm(last)
    torch.testing.assert_close(normed, target.prompt_hidden, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        first, model.get_input_embeddings()(torch.tensor(tokens)), rtol=1e-3, atol=1e-4
    )
    with pytest.raises(RuntimeError, match="sizes that do not fit"):
        list(target.prefill([1], 1, capture=(3,)))


# Heads.


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_speculators(form: str, reference: type[Any], tmp_path: Path) -> None:
    """After every place of a text, and of four states more; and nearly so in 8 bits."""
    target = CausalLM(tiny("llama"))
    folder = save_eagle3(tmp_path, target, **FORMS[form])
    theirs = reference(folder, target.model.get_input_embeddings().weight)
    features = states_of(target, TOKENS)
    errors = {}
    for few in (False, True):
        head = HiddenLM(load_head(folder, target), target, in_8_bits=few)
        assert torch.equal(head.hot, theirs.hot) and head.capture == CAPTURE
        head.add(4)
        distances = []
        for end in (1, 2, 3, 5):
            state = head.extend(
                [4], [features[head.length(4) : end]], [TOKENS[head.length(4) + 1 : end + 1]]
            )
            logits = [head.logits(state)[0]]
            drafted = TOKENS[end + 1 : end + 5]
            for k, token in enumerate(drafted):
                seen = torch.ones(1, 1, k + 1, dtype=torch.bool)
                state = head.branch([4], state[:, None], torch.tensor([[token]]), k, seen)[:, 0]
                logits.append(head.logits(state)[0])
            head.crop([4], [end])
            wanted = theirs.logits(features[:end], TOKENS[1 : end + 1], drafted)
            distances.append(float((torch.stack(logits) - wanted).norm() / wanted.norm()))
        errors[few] = max(distances)
    assert errors[False] < 1e-5 < 1e-3 < errors[True] < 0.3


def test_both_layouts_say_the_same(tmp_path: Path) -> None:
    target = CausalLM(tiny("llama"))
    layouts = "speculators", "original"
    heads = [
        load_head(save_eagle3(tmp_path / layout, target, layout), target) for layout in layouts
    ]
    one, other = (head.state_dict() for head in heads)
    assert one.keys() == other.keys() and all(map(torch.equal, one.values(), other.values()))
    assert heads[0].capture == heads[1].capture == CAPTURE
    deep = CausalLM(few_bits("llama", num_hidden_layers=7))
    folder = save_eagle3(tmp_path / "deep", deep, "original")
    assert load_head(changed(folder, eagle_config=None), deep).capture == (
        2,
        3,
        4,
    )  # low, middle and high


class Watched(EagleDrafter):
    def __init__(self, settings: Eagle, head: HiddenLM) -> None:
        super().__init__(settings, head, None, settings.width)
        self.proposed: list[tuple[list[int], Draft]] = []

    def propose(self, seqs: Any) -> Proposal:
        proposal = super().propose(seqs)
        self.proposed += [
            (list(seq.tokens), draft) for seq, draft in zip(seqs, proposal.drafts, strict=True)
        ]
        return proposal


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize(
    "settings", [Eagle(depth=4), Eagle(depth=3, width=2, nodes=5)], ids=["chain", "tree"]
)
def test_the_engine_drafts_what_speculators_says(
    settings: Eagle, reference: type[Any], tmp_path: Path
) -> None:
    """Each step of a batch drafts what speculators' code drafts.

    Tokens before it were accepted or rejected; requests are greedy and sampled.
    """
    target = CausalLM(tiny("llama"))
    folder = save_eagle3(tmp_path, target)
    theirs = reference(folder, target.model.get_input_embeddings().weight)
    drafter = Watched(settings, HiddenLM(load_head(folder, target), target, in_8_bits=False))
    engine = Engine(target.fresh(2**20), drafter, max_rows=3)
    for number, prompt in enumerate([*PROMPTS, PROMPTS[0]]):
        engine.add(Request(prompt, 8, Sampler(number != 3), seed=number))
    drain(engine)
    checked = 0
    for text, draft in drafter.proposed:
        if not draft.drafted:
            continue
        features = states_of(target, text[:-1])
        paths: list[list[list[int]]] = [[[]]]

        def logits(
            k: int,
            tokens: Tensor,
            at: Tensor,
            text: Any = text,
            features: Any = features,
            paths: Any = paths,
        ) -> Tensor:
            if k:
                own = zip(tokens[0].tolist(), at[0].tolist(), strict=True)
                paths.append([[*paths[-1][parent], token] for token, parent in own])
            return torch.stack([theirs.logits(features, text[1:], path)[-1] for path in paths[-1]])[
                None
            ]

        limit = max(draft.depths)
        search = searching(logits, theirs.hot, settings.width, drafter.nodes)
        (wanted,) = grow([text[-1]], search, [limit], settings.width, drafter.nodes)
        assert (draft.tokens, draft.parents) == (wanted.tokens, wanted.parents)
        checked += 1
    assert checked > 20


# Decoding.

WAYS: dict[str, Method] = {
    "chain": Eagle(),
    "tree": Eagle(depth=3, width=2, nodes=7),
    "paced": PacerEagle(depth=5),
    "hybrid": Hybrid(threshold=2.0, other="eagle:depth=3"),
}


SAMPLED: dict[str, Any] = {
    "max_new_tokens": 12,
    "temperature": 1.1,
    "seed": 3,
    "ignore_eos": True,
}


@cache
def plain_output(architecture: str) -> tuple[list[list[int]], list[int]]:
    """What plain decoding says after PROMPTS, which no method changes: greedy, and sampled."""
    decoder = Decoder(tiny(architecture), method=method("ar"))
    greedy = decoder.generate(PROMPTS, max_new_tokens=24, ignore_eos=True)
    return [row.tokens for row in greedy], decoder.generate(PROMPTS[0], **SAMPLED).tokens


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gemma3"])
@pytest.mark.parametrize("way", WAYS)
def test_greedy_output_is_that_of_plain_decoding(
    architecture: str, way: str, tmp_path: Path
) -> None:
    model = tiny(architecture)
    folder = save_eagle3(tmp_path, CausalLM(model))
    decoder = Decoder(model, None, None, WAYS[way], False, head=folder, costs=COSTS)
    plain, sampled = plain_output(architecture)
    drafts_as_plain(decoder, PROMPTS, plain)
    assert decoder.generate(PROMPTS[0], **SAMPLED).tokens == sampled


@pytest.mark.parametrize("bits", ["int4", "int8", "float32"])
def test_targets_in_c_are_drafted_for(bits: str, tmp_path: Path) -> None:
    """Whose features and embeddings come from few bits."""
    model = few_bits("qwen3")
    target = prepare(model if bits == "float32" else store(model, bits))
    assert isinstance(target.backend, QuantisedForward)
    folder = save_eagle3(tmp_path, target)
    decoder = Decoder(target, None, None, Eagle(depth=3, width=2, nodes=5), False, head=folder)
    ar = Decoder(target, method=method("ar"))
    plain, done = (
        each.generate(PROMPTS, max_new_tokens=24, ignore_eos=True) for each in (ar, decoder)
    )
    assert [row.tokens for row in done] == [row.tokens for row in plain] and done[0].stats.drafted


# The machinery, in a language in which each of 12 odd tokens follows the one before.

ODD = [*range(1, VOCAB, 2)]


def successor(folder: Path, target: CausalLM, *, is_mapped: bool = True) -> Path:
    """A head that can foresee every token does so.

    Its features tell the last token but one, and each of its states the next token.
    """
    sizes = {
        "intermediate_size": SIZE,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": SIZE,
    }
    save_eagle3(
        folder, target, **sizes, draft_vocab_size=len(ODD), eagle_aux_hidden_state_layer_ids=[1, 0]
    )
    path = folder / "model.safetensors"
    following = moves(dict(zip(ODD, [*ODD[1:], ODD[0]], strict=True)))
    weights = {name: weight * 0 + ("norm" in name) for name, weight in load_file(path).items()}
    weights["fc.weight"][:, SIZE:] = following
    norm = SIZE**0.5  # the largest number of a normed state
    weights |= {f"layers.0.mlp.{name}_proj.weight": torch.eye(SIZE) for name in ("gate", "up")}
    weights["layers.0.mlp.down_proj.weight"] = (following - torch.eye(SIZE)) / norm**2
    weights["lm_head.weight"] = 3 * torch.eye(SIZE)[ODD]
    weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(ODD), True)
    weights["d2t"] = torch.tensor([token - i if is_mapped else 0 for i, token in enumerate(ODD)])
    save_file({name: weight.contiguous() for name, weight in weights.items()}, path)
    return folder


@pytest.mark.parametrize(
    "settings", [Eagle(depth=5), Eagle(depth=5, width=2, nodes=20), PacerEagle(depth=5)]
)
def test_every_token_is_foreseen(settings: Eagle, tmp_path: Path) -> None:
    """But not by a head whose tokens are not mapped to the target's."""
    target = model(cycle(ODD))
    costs = Costs({1: 1.0, 100: 1.01}, {}, head={1: 1e-6})
    prompts = [[*ODD, *ODD[: 2 + number]] for number in range(5)]

    def run(head: Path) -> list[Any]:
        decoder = Decoder(target, None, None, settings, False, head=head, costs=costs, max_rows=3)
        return decoder.generate(prompts, max_new_tokens=37, ignore_eos=True)

    for done in run(successor(tmp_path / "right", CausalLM(target))):
        assert done.stats.acceptance_by_position == (1.0,) * 5 and done.stats.tau > 5
    wrong = run(successor(tmp_path / "wrong", CausalLM(target), is_mapped=False))
    assert all(
        done.stats.tau < 2 if settings.width > 1 else done.stats.accepted == 0 for done in wrong
    )


# What is refused, and how heads are given.


def changed(folder: Path, **settings: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 2}, "its layer has num_hidden_layers 2: one full-attention layer"),
    ({"hidden_act": "gelu"}, "its layer has hidden_act 'gelu'"),
    ({"model_type": "mistral"}, "its layer is of the type 'mistral'; it must be llama or qwen3"),
    ({"model_type": "llama", "sliding_window": 8}, "its layer has sliding_window 8"),
    (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope_type 'dynamic'",
    ),
    (
        {"intermediate_size": 40},
        r"by its config.json layers.0.mlp.\w+.weight is .*, and in its file",
    ),
    (
        {"model_type": "qwen3"},
        r"its weights do not fit its configuration \(layers.0.self_attn.k_norm.weight\)",
    ),
    ({"vocab_size": 65}, "t2d"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
@pytest.mark.parametrize("layout", ["speculators", "original"])
def test_heads_of_unknown_forms_are_refused(
    layout: str, wrong: dict[str, Any], message: str, tmp_path: Path
) -> None:
    target = CausalLM(tiny("llama"))
    folder = save_eagle3(tmp_path, target, layout)
    settings = json.loads((folder / "config.json").read_text())
    layer = settings.get("transformer_layer_config", settings) | wrong
    changed(folder, **(layer if layout == "original" else {"transformer_layer_config": layer}))
    refuses(f"the head {re.escape(repr(str(folder)))}.*{message}", load_head, folder, target)


def test_heads_of_other_targets_are_refused(tmp_path: Path) -> None:
    target = CausalLM(tiny("llama"))
    small = CausalLM(tiny("llama", vocab=50))
    ids = "eagle_aux_hidden_state_layer_ids"
    for name, maker, settings, message in (
        (
            "vocabulary",
            small,
            {},
            "belongs to another target: it reads 96 numbers and has a vocabulary of 50, where ",
        ),
        (
            "size",
            CausalLM(few_bits("llama", vocab_size=64)),
            {},
            "it reads 192 numbers and has a vocabulary of 64",
        ),
        ("layers", target, {ids: [2, 3, 1]}, r"after \[2, 3, 1\] layers; its target has 2"),
        ("none", target, {ids: []}, "its target has 2"),
        ("twice", target, {ids: [1, 1, 2]}, "its target has 2"),
    ):
        folder = save_eagle3(tmp_path / name, maker, **settings)
        refuses(message, load_head, folder, target)
    folder = save_eagle3(tmp_path / "narrow", target, hidden_size=16, target_hidden_size=32)
    refuses(
        "has no embeddings, and this target's have 32 numbers, not 16", load_head, folder, target
    )
    folder = save_eagle3(
        tmp_path / "own", target, hidden_size=16, target_hidden_size=32, embedding=True
    )
    HiddenLM(load_head(folder, target), target).add(0)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"d2t": weights["d2t"] + 64}, folder / "model.safetensors")
    refuses("hot set that does not fit the target's vocabulary of 64", load_head, folder, target)


def test_other_drafters_are_refused_before_the_target_is_loaded(tmp_path: Path) -> None:
    target = CausalLM(tiny("llama"))
    folder = save_eagle3(tmp_path / "head", target)
    allowed = "--head takes a head of `forerun train lyanna`, or an "
    for kind in ("dflash", "mtp", "peagle", "eagle"):
        changed(folder, speculators_model_type=kind)
        with pytest.raises(
            ValueError, match=f"is a model of the type '{kind}' of speculators: {allowed}"
        ):
            forerun.load("no-such/model", head=folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(
        json.dumps({"architectures": ["DFlashDraftModel"]})
    )
    with pytest.raises(ValueError, match=f"is of the architecture 'DFlashDraftModel': {allowed}"):
        forerun.load("no-such/model", head=tmp_path / "other")
    pickled = save_eagle3(tmp_path / "pickled", target, "original")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    refuses(
        r"pickled weights \(pytorch_model.bin\), which may run code",
        forerun.load,
        "no-such/model",
        head=pickled,
    )
    (pickled / "pytorch_model.bin").unlink()
    refuses(r"there is no model\.safetensors", load_head, pickled, target)
    save_models(tmp_path, model=tiny("llama"))
    refuses("this is a model: --target or --draft", load_head, tmp_path / "model", target)
    save_eagle3(tmp_path / "right", target)
    for part in ("draft", "target"):
        refuses(f"--{part} '.*right': this is a head: --head", load_model, tmp_path / "right", part)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["speculators", "original"])
def test_a_head_alone_names_its_method(layout: str, tmp_path: Path) -> None:
    save_models(tmp_path, target=tiny("llama", vocab=len(tiny_tokenizer())))
    target = CausalLM(tiny("llama", vocab=len(tiny_tokenizer())))
    folder = save_eagle3(tmp_path / "head", target, layout, draft_vocab_size=len(tiny_tokenizer()))
    decoder = forerun.load(tmp_path / "target", head=folder)
    assert (
        decoder.method == Eagle() and decoder.head is not None and decoder.head.capture == CAPTURE
    )
    assert decoder.generate("the cat", max_new_tokens=9, ignore_eos=True).stats.drafted
    assert forerun.load(tmp_path / "target", head=folder, width=2, depth=3).method == Eagle(
        depth=3, width=2
    )
    with pytest.raises(ValueError, match="of the kind 'eagle'; the method needs 'lyanna'"):
        forerun.load(tmp_path / "target", head=folder, method="lyanna")
    arguments = [
        "--target",
        str(tmp_path / "target"),
        "--head",
        str(folder),
        "--max-new-tokens",
        "9",
    ]
    done = run_cli("generate", "the cat", *arguments, "--method", "pacer-eagle")
    assert done.returncode == 0, done.stderr
    changed(folder, speculators_model_type="dflash")
    done = run_cli("generate", "the cat", *arguments)
    assert (
        done.returncode == 2
        and done.stdout == ""
        and done.stderr.count("\n") == 1
        and "'dflash'" in done.stderr
    )


def test_costs_are_measured_and_embeddings_shared(tmp_path: Path) -> None:
    """Embeddings that are the target's are not kept twice."""
    target = CausalLM(tiny("llama"))
    folder = save_eagle3(tmp_path, target, embedding=True)
    head = load_head(folder, target)
    assert isinstance(head, Eagle3Head) and head.embed_tokens is not None
    costs = head_costs(HiddenLM(head, target), 8)
    assert set(costs) == {1, 2, 4, 8, 16} and min(costs.values()) > 0
    weights = load_file(folder / "model.safetensors")
    theirs = {"embed_tokens.weight": target.model.get_input_embeddings().weight.data}
    save_file(weights | theirs, folder / "model.safetensors")
    again = load_head(folder, target)
    assert isinstance(again, Eagle3Head) and again.embed_tokens is None
