"""Language-model training on token streams: the loss, its validation and small Llama configurations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase


def new_llama(
    tokenizer: PreTrainedTokenizerBase,
    width: int,
    layers: int,
    heads: int,
    mlp: int,
    context: int,
    seed: int,
    head_size: int | None = None,
    vocabulary: int | None = None,
) -> LlamaForCausalLM:
    """A fresh Llama with tied embeddings over the tokenizer's vocabulary; heads of width / heads by default."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary or len(tokenizer),
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=head_size or width // heads,
            intermediate_size=mlp,
            max_position_embeddings=context,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


@torch.no_grad()
def deepen(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A model of twice the layers that computes the same: every layer is followed by a copy of itself that adds
    nothing yet, its output projections being 0. For training on; stacking is an old idea (Gong et al. 2019), the
    silent copies are those of LLaMA Pro (arXiv 2401.02415)."""
    config = LlamaConfig(**model.config.to_dict() | {"num_hidden_layers": 2 * model.config.num_hidden_layers})
    deep = LlamaForCausalLM(config)
    old, new = model.state_dict(), {}
    for name, value in old.items():
        head, _, tail = name.partition("layers.")
        if not tail:
            new[name] = value
            continue
        number, _, rest = tail.partition(".")
        new[f"{head}layers.{2 * int(number)}.{rest}"] = value
        silent = rest in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
        new[f"{head}layers.{2 * int(number) + 1}.{rest}"] = torch.zeros_like(value) if silent else value
    deep.load_state_dict(new)
    return deep


def logits_of(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Logits [B, T, V] in bfloat16 autocast: fast where the hardware multiplies bfloat16, fine for training."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        return model(input_ids=tokens, use_cache=False).logits


def states_at(model: PreTrainedModel, tokens: Tensor, places: Tensor) -> Tensor:
    """What the LM head would be given [n, d] over tokens [B, T] where places [B, T] are true. It is not run."""
    heard: list[Tensor] = []

    def hear(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        heard.append(inputs[0][places])
        return (inputs[0][:, :0], *inputs[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(hear)
    try:
        model(input_ids=tokens, use_cache=False)
    finally:
        handle.remove()
    return heard[0]


def next_token_loss(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Mean cross-entropy in nats of tokens[:, 1:] given what stands before them, for tokens [B, T+1]."""

    def loss(tokens: Tensor) -> Tensor:
        logits = logits_of(model, tokens[:, :-1])
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    return loss


@torch.no_grad()
def mean_loss(model: PreTrainedModel, batches: list[Tensor]) -> float:
    """Mean of `next_token_loss` over token batches [B, T+1] of one shape."""
    loss, training = next_token_loss(model), model.training
    model.eval()
    value = sum(float(loss(batch.to(model.device))) for batch in batches) / len(batches)
    model.train(training)
    return value
