"""Toy languages whose every answer is known; models, heads and layers have weights set by hand.

A state is one-hot: state t below VOCAB is the target's state after token t, the others are a head's
own. What follows from each state is a row of a table, so a test can say exactly what a method must
do.
"""

from collections.abc import Mapping, Sequence
from math import log, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from forerun.heads.heads import HiddenConfig, HiddenDrafter
from forerun.heads.pre_verifier import PreVerifier, PreVerifierConfig
from forerun.model.causal_lm import CausalLM, fingerprint

VOCAB, SIZE = 24, 64
CONTEXT = 512
RARE = 1e-4
PLAIN: dict[str, Any] = {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None}

Row = int | Mapping[int, float]


def logits(row: Row) -> Tensor:
    """Logits [VOCAB] of a distribution: one token, or tokens by probability.

    Other tokens are RARE and have logit 0.
    """
    probabilities = torch.full((VOCAB,), RARE)
    for token, probability in {row: 0.9}.items() if isinstance(row, int) else row.items():
        probabilities[token] = probability
    return probabilities.log() - log(RARE)


def cycle(tokens: Sequence[int]) -> dict[int, Row]:
    """The language that says these tokens over and over."""
    return dict(zip(tokens, [*tokens[1:], tokens[0]], strict=True))


@torch.no_grad()
def model(rows: Mapping[int, Row]) -> LlamaForCausalLM:
    """A Llama whose next token follows from its last one.

    `rows` are logits by state, a head's own states among them.
    """
    sizes = {
        "hidden_size": SIZE,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    made = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, max_position_embeddings=CONTEXT, **sizes, **PLAIN)
    ).eval()
    layer = made.model.layers[0]
    for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
        weight.zero_()
    made.model.embed_tokens.weight.copy_(torch.eye(VOCAB, SIZE))
    made.lm_head.weight.zero_()
    for state, row in rows.items():
        made.lm_head.weight[:, state] = logits(row) / sqrt(SIZE)
    return made


@torch.no_grad()
def counter(period: int, coins: int = 0) -> GPT2LMHeadModel:
    """A GPT-2 that says n % period after position n, whatever came before.

    After every `coins`-th position it says any of the first eight tokens.
    """
    sizes = {"n_embd": SIZE, "n_layer": 1, "n_head": 2, "n_positions": CONTEXT}
    made = GPT2LMHeadModel(GPT2Config(vocab_size=period, **sizes, **PLAIN)).eval()
    block = made.transformer.h[0]
    for part in (block.attn.c_proj, block.mlp.c_proj, made.transformer.wte):
        part.weight.zero_()
    places = torch.arange(CONTEXT) % period
    made.transformer.wpe.weight.copy_(torch.eye(SIZE)[places])
    made.lm_head.weight.copy_(3 * torch.eye(period, SIZE))
    for place in range(0, period, coins) if coins else ():
        made.lm_head.weight[:, place] = 0.0
        made.lm_head.weight[:8, place] = 3.0
    return made


def moves(pairs: Mapping[int, int]) -> Tensor:
    """A matrix [SIZE, SIZE] that maps each of these states to another one, and others to zeros."""
    matrix = torch.zeros(SIZE, SIZE)
    for before, after in pairs.items():
        matrix[after, before] = 1.0
    return matrix


@torch.no_grad()
def head(
    target: PreTrainedModel,
    kind: str = "lyanna",
    states: Mapping[int, int] | None = None,
    tokens: Mapping[int, int] | None = None,
    information: Mapping[int, Row] | None = None,
    **settings: Any,
) -> nn.Module:
    """A head that is a table.

    The next state follows from the state before by `states`, or from the token after that by
    `tokens`. `information` is the token information.
    """
    lm = CausalLM(target)
    config = dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), SIZE)
    config |= dict.fromkeys(("rank", "vocab_size", "hot_size"), VOCAB)
    config |= {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
    }
    made = HiddenDrafter(HiddenConfig(kind=kind, target=lm.fingerprint, **config | settings)).eval()
    made.hot.copy_(torch.arange(VOCAB))
    for layer in made.layers:
        layer.out.weight.zero_()
        layer.down.weight.zero_()
    made.fuse.weight.copy_(torch.cat([moves(states or {}), moves(tokens or {})], 1))
    if kind == "lyanna":
        made.hot.copy_(
            made.hot.flip(0)
        )  # of equally likely tokens those that nobody says come first
        made.embed.weight.copy_(torch.eye(VOCAB))
        made.answer.weight.zero_()
        for token, row in (information or {}).items():
            made.answer.weight[:, token] = logits(row).flip(0) / sqrt(VOCAB)
    return made


@torch.no_grad()
def copying_head(target: PreTrainedModel, back: int) -> nn.Module:
    """An EAGLE-like head that repeats what came `back` tokens before; its attention is by distance.

    State VOCAB + t is to say token t, and no other state but the target's own anything.
    """
    made = head(target, "eagle", rope_theta=100.0)
    quiet, constant = (
        2 * VOCAB,
        SIZE - 1,
    )  # the token that it is given goes to quiet + t % 15; tokens below 15 only
    fuse = torch.zeros(SIZE, SIZE)
    for token in range(15):
        fuse[quiet + token, token] = fuse[constant, token] = 1.0
    made.fuse.weight.copy_(torch.cat([torch.zeros(SIZE, SIZE), fuse], 1))
    (layer,) = made.layers
    angles = -(back - 1) * layer.frequencies(
        torch.device("cpu")
    )  # an entry stands before the token that it answers
    query = torch.cat([angles.cos(), angles.sin()])
    key = torch.cat([torch.ones(SIZE // 2), torch.zeros(SIZE // 2)])
    layer.qkv.weight.zero_()
    layer.qkv.weight[:SIZE, constant], layer.qkv.weight[SIZE : 2 * SIZE, constant] = (
        5 * query,
        5 * key,
    )
    for token in range(15):
        layer.qkv.weight[2 * SIZE + token, quiet + token] = 1.0
        layer.out.weight[VOCAB + token, token] = 4.0
    return made


@torch.no_grad()
def layer(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    bias: float,
    units: Sequence[tuple[str, int, float, float]] = (),
) -> PreVerifier:
    """A pre-verifier that is a sum over its units.

    Its output is bias + the sum of gain * relu(weight * input[index]) over units of (input, index,
    weight, gain).
    """
    width = max(len(units), 4)
    config = PreVerifierConfig(width)
    config.target = fingerprint(target)
    config.draft = fingerprint(draft)
    made = PreVerifier(config).eval()
    for parameter in made.parameters():
        parameter.zero_()
    made.middle.weight.copy_(torch.eye(width))
    made.leave.bias.fill_(bias)
    for at, (name, index, weight, gain) in enumerate(units):
        made.enter[name].weight[at, index] = weight
        made.leave.weight[0, at] = gain
    return made
