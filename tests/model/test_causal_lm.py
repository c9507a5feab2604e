"""CausalLM against plain forwards.

Trees, ragged rows, sliding windows and commits; and what it refuses to load.
"""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from benchmarks.baselines.lookup import Lookup
from forerun import Decoder
from forerun.backends import prepare
from forerun.engine.draft import Draft
from forerun.model.causal_lm import CausalLM, fingerprint, same_model
from forerun.model.eager import EagerForward, capture_hidden_states
from tests.support import families
from tests.support.toys import (
    ARCHITECTURES,
    VOCAB,
    WINDOW,
    extend,
    join_all,
    random_tree,
    refuses,
    tiny,
)


@torch.inference_mode()
def check_logits(lm: CausalLM, rows: dict[int, list[int]], drafts: list[Draft]) -> None:
    """Compares the logits of every node with those of a forward over the row and the path alone."""
    logits = lm.forward(list(rows), drafts).logits
    for row, draft, got in zip(rows.values(), drafts, logits, strict=True):
        assert got.shape == (len(draft), lm.vocab_size)
        for leaf in (node for node in range(len(draft)) if not draft.children[node]):
            path = draft.path(leaf)
            ids = torch.tensor([row + [draft.tokens[node] for node in path]])
            expected = lm.model(ids, use_cache=False).logits[0, len(row) :]
            torch.testing.assert_close(got[path], expected, atol=1e-4, rtol=1e-4)


def longest_crooked_path(draft: Draft) -> list[int]:
    """The deepest path, of these the one whose nodes lie farthest apart."""
    return max(
        (draft.path(node) for node in range(len(draft))), key=lambda path: (len(path), path[-1])
    )


def random_rows(lengths: Sequence[int], generator: torch.Generator) -> dict[int, list[int]]:
    return {
        7 * i + 3: torch.randint(VOCAB, (n,), generator=generator).tolist()
        for i, n in enumerate(lengths)
    }


@pytest.mark.parametrize("attention", [None, "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_trees_equal_plain_forwards(architecture: str, attention: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    lm = CausalLM(tiny(architecture, attention=attention))
    rows = random_rows((21, 0, 34, 9), generator)
    join_all(lm, rows, chunk=16)
    crooked = 0
    for sizes in ((10, 4, 7, 1), (1, 9, 12, 6), (8, 8, 1, 12)):
        drafts = [random_tree(size, VOCAB, generator) for size in sizes[: len(rows)]]
        check_logits(lm, rows, drafts)
        paths = [longest_crooked_path(draft) for draft in drafts]
        crooked += sum(path != list(range(len(path))) for path in paths)
        lm.commit(list(rows), paths)
        for id, draft, path in zip(rows, drafts, paths, strict=True):
            rows[id] = rows[id] + [draft.tokens[node] for node in path]
        if len(rows) == 4:  # the last row takes the first one's place
            first = min(rows)
            lm.drop(first)
            del rows[first]
        rows = dict(sorted(rows.items(), reverse=True))  # another order
    assert crooked > 4  # else nothing was gathered
    rows = {
        id: row[: len(row) - cut] for (id, row), cut in zip(rows.items(), (2, 0, 30), strict=True)
    }
    lm.crop(list(rows), [len(row) for row in rows.values()])
    check_logits(lm, rows, [random_tree(6, VOCAB, generator) for _ in rows])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tree_deeper_than_the_window_has_the_logits_of_plain_forwards(architecture: str) -> None:
    # A spine with a leaf beside each node, so that places in the cache and positions drift apart.
    generator = torch.Generator().manual_seed(3)
    depth = WINDOW + 8
    tokens = torch.randint(VOCAB, (2 * depth + 1,), generator=generator).tolist()
    tree = Draft(tokens, [-1, *(2 * (node // 2) for node in range(2 * depth))])
    assert max(tree.depths) == depth
    lm = CausalLM(tiny(architecture))
    rows = random_rows((5, 20), generator)
    join_all(lm, rows)
    check_logits(lm, rows, [tree, tree])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chains_of_even_and_ragged_rows_equal_plain_forwards(architecture: str) -> None:
    generator = torch.Generator().manual_seed(1)
    lm = CausalLM(tiny(architecture))
    for lengths in ((20, 20), (20, 3), (0, 0), (19, 0)):
        lm.reset()
        rows = random_rows(lengths, generator)
        first, second = rows
        join_all(lm, rows)
        for sizes in ((1, 5), (4, 4), (6, 1)):
            chains = [torch.randint(VOCAB, (size,), generator=generator).tolist() for size in sizes]
            check_logits(lm, rows, [Draft.chain(chain[0], chain[1:]) for chain in chains])
            # `extend` gives the same and commits it, for some rows or all, also with an empty
            # chain.
            logits = (
                lm.extend([first], [chains[0]])
                if sizes[0] == 4
                else lm.extend([second, first], [[], chains[0]])
            )
            assert logits[-1].shape[0] == len(chains[0]) and len(logits[0]) in (0, 4)
            rows[first] = rows[first] + chains[0]
            assert [lm.length(id) for id in rows] == [len(row) for row in rows.values()]
        check_logits(lm, rows, [random_tree(5, VOCAB, generator) for _ in rows])


def test_a_row_at_the_end_of_the_context_does_not_stop_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(2)
    lm = CausalLM(tiny("gpt2", context=16))
    rows = random_rows((16, 3), generator)
    join_all(lm, rows)
    full, short = rows
    check_logits(lm, {short: rows[short]}, [Draft.chain(5, [6, 7])])
    got = lm.extend([full, short], [[], [5, 6, 7]])[1]
    with torch.inference_mode():
        expected = lm.model(torch.tensor([[*rows[short], 5, 6, 7]]), use_cache=False).logits[0, 3:]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def small(name: str, **settings: Any) -> PreTrainedModel:
    """A model of the class `transformers.{name}`.

    Settings that its configuration does not know are ignored.
    """
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
    }
    cls = getattr(transformers, name)
    return cls(
        cls.config_class(**sizes | {"num_attention_heads": 2, "num_key_value_heads": 2} | settings)
    )


T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
}
LINEAR |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {
    "num_experts": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "head_dim": 8,
}
LLAMA4 = {
    "intermediate_size_mlp": 16,
    "num_local_experts": 1,
    "head_dim": 8,
    "num_hidden_layers": 4,
}


def test_what_cannot_run_trees_is_refused() -> None:
    for name, settings, reason in (
        (
            "GPTNeoForCausalLM",
            {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
            "counts positions by",
        ),
        ("FalconForCausalLM", {"alibi": True}, "counts positions by"),
        ("RobertaForCausalLM", {"is_decoder": True}, "counts positions by"),
        ("MambaForCausalLM", {}, "roll back"),
        ("Llama4ForCausalLM", LLAMA4, "roll back.*chunked_attention"),
        ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}, "roll back.*conv"),
        ("Qwen3NextForCausalLM", LINEAR | EXPERTS, "roll back.*linear_attention"),
        ("T5ForConditionalGeneration", T5, "encoder-decoder"),
        ("BloomForCausalLM", {"n_head": 2}, "position_ids"),
        (
            "LlamaForCausalLM",
            {"attn_implementation": "flex_attention"},
            "flex_attention.*attn_implementation",
        ),
    ):
        named = "" if "flex" in reason else f"{name}.*"
        refuses(named + reason, CausalLM, small(name, **settings))


def test_longrope_ends_where_its_factors_would_change() -> None:
    factors = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "rope_theta": 10000.0,
    }
    model = small("Phi3ForCausalLM", original_max_position_embeddings=32, rope_parameters=factors)
    assert model.config.max_position_embeddings > 32 and CausalLM(model).context == 32
    decoder = Decoder(model, None, None, Lookup(4, 1))
    for prompt in ([3, 4, 5, 3, 4], [7] * 20):
        ids = torch.tensor([prompt])
        wanted = model.generate(ids, max_length=32, do_sample=False, eos_token_id=None)[
            0, len(prompt) :
        ].tolist()
        assert decoder.generate(prompt, max_new_tokens=40, ignore_eos=True).tokens == wanted


@pytest.mark.parametrize(
    ("architecture", "in_c"), [*((name, False) for name in ARCHITECTURES), ("llama", True)]
)
def test_hidden_states_are_what_the_head_was_given(architecture: str, in_c: bool) -> None:
    prompt = [5, 6, 7, 8, 3, 2, 1]
    lm = prepare(families.tiny(architecture)) if in_c else CausalLM(tiny(architecture))
    assert isinstance(lm.backend, EagerForward) != in_c
    assert list(lm.prefill([], 4, capture="head")) == [] and lm.prompt_hidden.shape == (
        0,
        lm.head.in_features,
    )
    join_all(lm, {1: prompt[:3]}, capture="head")
    assert list(lm.prefill(prompt, 4, capture="head")) == [4]  # three are there
    assert lm.prompt_hidden is not None and lm.prompt_hidden.shape == (7, lm.head.in_features)
    lm.join(2)
    with torch.inference_mode(), capture_hidden_states(lm.model) as captured:
        whole = lm.model(torch.tensor([[*prompt, 9, 4]]), use_cache=False).logits[0]
    torch.testing.assert_close(lm.prompt_hidden, captured[0][0, :7], rtol=1e-4, atol=1e-4)
    logits, hidden = extend(lm, [2, 1], [[9, 4], [3]])
    assert hidden is not None and [len(own) for own in hidden] == [2, 1]
    torch.testing.assert_close(hidden[0], captured[0][0, 7:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[0], whole[7:], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_a_long_prompt_makes_no_logits_of_all_its_tokens(architecture: str, hidden: bool) -> None:
    model = tiny(architecture, vocab=20_000, context=4096)  # logits of the prompt would take 96 MB
    for lm in (CausalLM(model), prepare(model)):
        seen: list[int] = []
        hook = lm.head.register_forward_hook(
            lambda module, given, found, seen=seen: seen.append(found.shape[1])
        )
        prompt = list(range(1200))
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            chunks = list(lm.prefill(prompt, 512, capture="head" if hidden else ""))
            assert chunks == [512, 512, 176]
        hook.remove()
        largest = max(event.cpu_memory_usage for event in profile.events())
        assert max(seen, default=1) == 1 and largest < 40_000_000, (seen, largest)
        assert lm.prefilled == 1200
        assert (lm.prompt_hidden is not None and lm.prompt_hidden.shape == (1200, 32)) == hidden


def test_what_another_thread_runs_is_not_captured() -> None:
    lm = CausalLM(tiny("qwen3"))
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad(), capture_hidden_states(lm.model, last_only=True) as captured:
        shapes: list[torch.Size] = []
        thread = threading.Thread(target=lambda: shapes.append(lm.model(ids).logits.shape))
        thread.start()
        thread.join()
        assert shapes == [(1, 3, VOCAB)] and not captured
        assert lm.model(ids).logits.shape == (1, 1, VOCAB) and len(captured) == 1
    assert lm.model(ids).logits.shape == (1, 3, VOCAB)


def quantise(linear: torch.nn.Linear, buffer: bool) -> None:
    """Store a layer's weight as no floating-point parameter."""
    packed = (linear.weight.detach() * 100).to(torch.int8)
    del linear.weight
    if buffer:
        linear.register_buffer("qweight", packed)
    else:
        linear.weight = torch.nn.Parameter(packed, requires_grad=False)


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_quantised_model_is_the_model_and_no_other(architecture: str, buffer: bool) -> None:
    model = tiny(architecture)
    other = tiny(architecture, seed=1)
    before = fingerprint(model)
    assert all(isinstance(number, float) for number in before["weights"])
    assert same_model(before, fingerprint(tiny(architecture).to(torch.bfloat16)))
    for each in (model, other):
        for layer in each.model.layers:
            for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                quantise(linear, buffer)
    after = fingerprint(model)
    assert None in after["weights"] and any(after["weights"])
    assert same_model(before, after) and same_model(after, before)
    assert not same_model(before, fingerprint(other)) and not same_model(after, fingerprint(other))
    CausalLM(model)


def test_memory_is_reserved_by_rows_and_positions() -> None:
    lm = CausalLM(tiny("llama"))
    size = lm.position_bytes  # known before anything is run
    assert size == 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, their size, bytes
    assert lm.cache.allocated_bytes == 0 and lm.prefilled == 0
    assert lm.fits(0, 300, 512 * size) and not lm.fits(0, 300, 512 * size - 1)
    join_all(lm, {0: [1, 2, 3]}, reserve=300)
    assert lm.fits(1, 100, 1024 * size) and not lm.fits(1, 100, 1023 * size)
    assert lm.cache.allocated_bytes == 512 * size and lm.memory().used == 3 * size
