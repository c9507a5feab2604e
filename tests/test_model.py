"""CausalLM against plain forwards: trees, ragged rows, sliding windows, commits; and what it refuses to load."""

from __future__ import annotations

import pytest
import torch
from toys import ARCHITECTURES, VOCAB, WINDOW, random_tree, tiny
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from forerun import Decoder
from forerun.draft import Draft
from forerun.methods import Lookup
from forerun.model import CausalLM
from forerun.runtime import prepare


@torch.inference_mode()
def check_logits(lm: CausalLM, rows: list[list[int]], drafts: list[Draft]) -> None:
    """Compares the logits of every node with those of a forward over the row and the path alone."""
    logits = lm.forward(drafts)
    for row, draft, got in zip(rows, drafts, logits, strict=True):
        assert got.shape == (len(draft), lm.vocab_size)
        for leaf in (node for node in range(len(draft)) if not draft.children[node]):
            path = draft.path(leaf)
            ids = torch.tensor([row + [draft.tokens[node] for node in path]])
            expected = lm.model(ids, use_cache=False).logits[0, len(row) :]
            torch.testing.assert_close(got[path], expected, atol=1e-4, rtol=1e-4)


def longest_crooked_path(draft: Draft) -> list[int]:
    """The deepest path, of these the one whose nodes lie farthest apart."""
    return max((draft.path(node) for node in range(len(draft))), key=lambda path: (len(path), path[-1]))


@pytest.mark.parametrize("attention", [None, "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_trees_equal_plain_forwards(architecture: str, attention: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    lm = CausalLM(tiny(architecture, attention=attention))
    rows = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in (21, 0, 34, 9)]
    lm.start(rows)
    crooked = 0
    for sizes in ((10, 4, 7, 1), (1, 9, 12, 6), (8, 8, 1, 12)):
        drafts = [random_tree(size, VOCAB, generator) for size in sizes[: len(rows)]]
        check_logits(lm, rows, drafts)
        paths = [longest_crooked_path(draft) for draft in drafts]
        crooked += sum(path != list(range(len(path))) for path in paths)
        lm.commit(paths)
        rows = [row + [draft.tokens[i] for i in path] for row, draft, path in zip(rows, drafts, paths, strict=True)]
        if len(rows) == 4:
            lm.keep([3, 1, 2])
            rows = [rows[3], rows[1], rows[2]]
    assert crooked > 4  # else nothing was gathered
    lengths = [len(row) - cut for row, cut in zip(rows, (2, 0, 30), strict=True)]
    lm.crop(lengths)
    rows = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    check_logits(lm, rows, [random_tree(6, VOCAB, generator) for _ in rows])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tree_deeper_than_the_window(architecture: str) -> None:
    # A spine with a leaf beside each node, so that places in the cache and positions drift apart.
    generator = torch.Generator().manual_seed(3)
    depth = WINDOW + 8
    tokens = torch.randint(VOCAB, (2 * depth + 1,), generator=generator).tolist()
    tree = Draft(tokens, [-1, *(2 * (node // 2) for node in range(2 * depth))])
    assert max(tree.depths) == depth
    lm = CausalLM(tiny(architecture))
    rows = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in (5, 20)]
    lm.start(rows)
    check_logits(lm, rows, [tree, tree])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chains_of_even_and_ragged_rows_equal_plain_forwards(architecture: str) -> None:
    generator = torch.Generator().manual_seed(1)
    lm = CausalLM(tiny(architecture))
    for lengths in ((20, 20), (20, 3), (0, 0), (19, 0)):
        rows = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]
        lm.start(rows)
        for sizes in ((1, 5), (4, 4), (6, 1)):
            chains = [torch.randint(VOCAB, (size,), generator=generator).tolist() for size in sizes]
            check_logits(lm, rows, [Draft.chain(chain[0], chain[1:]) for chain in chains])
            # `extend` gives the same and keeps it; an empty chain leaves its row alone.
            logits = lm.extend([chains[0], []])
            assert logits[0].shape[0] == len(chains[0]) and logits[1].shape[0] == 0
            rows[0] = rows[0] + chains[0]
            assert lm.cache.lengths == [len(row) for row in rows]
        check_logits(lm, rows, [random_tree(5, VOCAB, generator) for _ in rows])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("chains", [[[3, 4], [5], []], [[7], [8], [9]], [[6, 2, 1]]])
def test_rolling_on_is_running_the_likeliest_token_again_and_again(architecture: str, chains: list[list[int]]) -> None:
    few = VOCAB // 2  # tokens from here on are not to be chosen
    one, other = CausalLM(tiny(architecture)), CausalLM(tiny(architecture))
    for lm in (one, other):
        lm.keeps_hidden = True
        lm.start([[1, 2, 3], [4] * 20, [5]][: len(chains)])
    tokens, logits, hidden = one.roll(chains, 4, few)
    assert tokens.shape == (len(chains), 4) and int(tokens.max()) < few
    given = chains
    for turn in range(4):
        found = other.extend(given)
        assert other.hidden is not None
        for row, chain in enumerate(given):
            if chain:
                torch.testing.assert_close(logits[turn][row], found[row][-1], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(hidden[turn][row], other.hidden[row, len(chain) - 1], atol=1e-4, rtol=1e-4)
                assert int(tokens[row, turn]) == int(found[row][-1][:few].argmax())
        given = [tokens[row, turn : turn + 1].tolist() if chain else [] for row, chain in enumerate(given)]
    assert one.cache.lengths == other.cache.lengths
    for a, b in zip(one.extend([[1]] * len(chains)), other.extend([[1]] * len(chains)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_row_at_the_end_of_the_context_does_not_stop_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(2)
    lm = CausalLM(tiny("gpt2", context=16))
    rows = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in (16, 3)]
    lm.start(rows)
    chain = [5, 6, 7]
    got = lm.extend([[], chain])[1]
    with torch.inference_mode():
        expected = lm.model(torch.tensor([rows[1] + chain]), use_cache=False).logits[0, 3:]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def mamba() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1))


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))


def bloom() -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2))


def chunked() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "intermediate_size_mlp": 16, "num_attention_heads": 2}
    more = {"num_key_value_heads": 2, "num_local_experts": 1, "head_dim": 8, "num_hidden_layers": 4, "vocab_size": 32}
    return Llama4ForCausalLM(Llama4TextConfig(pad_token_id=0, **sizes, **more))


_SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "pad_token_id": 0}
_SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}


def lfm2() -> PreTrainedModel:
    return Lfm2ForCausalLM(Lfm2Config(**_SMALL, layer_types=["conv", "full_attention"]))


def qwen3_next() -> PreTrainedModel:
    kinds = ["linear_attention", "full_attention"]
    linear = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    experts = {"num_experts": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(**_SMALL, layer_types=kinds, head_dim=8, linear_value_head_dim=8, **linear, **experts)
    )


def flex() -> PreTrainedModel:
    return tiny("llama", attention="flex_attention")


def gpt_neo() -> PreTrainedModel:
    kinds = [[["global", "local"], 1]]
    return GPTNeoForCausalLM(
        GPTNeoConfig(vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, attention_types=kinds)
    )


def alibi() -> PreTrainedModel:
    return FalconForCausalLM(
        FalconConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, alibi=True)
    )


def roberta() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    return RobertaForCausalLM(RobertaConfig(vocab_size=32, is_decoder=True, **sizes))


def longrope() -> PreTrainedModel:
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10000.0}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    return Phi3ForCausalLM(
        Phi3Config(vocab_size=32, pad_token_id=0, original_max_position_embeddings=32, rope_parameters=factors, **sizes)
    )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (gpt_neo, "GPTNeoForCausalLM takes positions from its cache"),
        (alibi, "FalconForCausalLM takes positions"),
        (roberta, "RobertaForCausalLM takes positions"),
        (mamba, "MambaForCausalLM.*roll back"),
        (chunked, "Llama4ForCausalLM.*roll back.*chunked_attention"),
        (lfm2, "Lfm2ForCausalLM.*roll back.*conv"),
        (qwen3_next, "Qwen3NextForCausalLM.*roll back.*linear_attention"),
        (t5, "T5ForConditionalGeneration.*encoder-decoder"),
        (bloom, "BloomForCausalLM.*position_ids"),
        (flex, "flex_attention.*attn_implementation"),
    ],
)
def test_what_cannot_run_trees_is_refused(make, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        CausalLM(make())


def test_longrope_ends_where_its_factors_would_change() -> None:
    model = longrope()
    assert model.config.max_position_embeddings > 32
    assert CausalLM(model).context == 32
    decoder = Decoder(model, None, None, Lookup(4, 1))
    for prompt in ([3, 4, 5, 3, 4], [7] * 20):
        ids = torch.tensor([prompt])
        wanted = model.generate(ids, max_length=32, do_sample=False, eos_token_id=None)[0, len(prompt) :].tolist()
        assert decoder.generate(prompt, max_new_tokens=40, ignore_eos=True).tokens == wanted


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hidden_states_are_what_the_head_was_given(architecture: str) -> None:
    plain = CausalLM(tiny(architecture))
    plain.keeps_hidden = True
    plain.start([[5, 6, 7], [8]])
    assert plain.hidden is not None and plain.hidden.shape[:2] == (2, 3)  # of prompts, padded
    before = plain.hidden[0, -1]
    again = plain.fresh()
    again.start([[5, 6]])
    again.extend([[7]])
    torch.testing.assert_close(again.hidden[0, 0], before, rtol=1e-4, atol=1e-4)
    logits = plain.extend([[9, 4], [3]])
    assert plain.hidden is not None and plain.hidden.shape[:2] == (2, 2)
    with torch.inference_mode():
        said = plain.head(plain.hidden)
    # Some models scale or cap what the head says, which keeps the order.
    for row, of_head in zip(logits, said, strict=True):
        assert torch.equal(row.argsort(-1)[:, -5:], of_head[: len(row)].argsort(-1)[:, -5:])


@pytest.mark.parametrize("prompts", [[[5, 6, 7]], [[5, 6, 7], [8]]])
def test_the_lean_forward_keeps_the_same_hidden_states(prompts: list[list[int]]) -> None:
    model = tiny("llama")
    both = [CausalLM(model), prepare(model)]
    for each in both:
        each.keeps_hidden = True
        each.start(prompts)
    assert both[1]._forward is not None
    torch.testing.assert_close(both[1].hidden[0], both[0].hidden[0], rtol=1e-4, atol=1e-4)
    for each in both:
        each.extend([[9, 4, 2]] * len(prompts))
    torch.testing.assert_close(both[1].hidden, both[0].hidden, rtol=1e-4, atol=1e-4)
