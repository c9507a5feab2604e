"""Check whether a model can run drafts, and find how long its sequences may be."""

from __future__ import annotations

import inspect

from transformers import PreTrainedConfig, PreTrainedModel

from forerun.model.compat import cache_argument

MAX_POSITIONS = 1 << 24  # of a model, because tables of rotations hold all of its positions
_ATTENTION = {"full_attention", "sliding_attention"}
# Models whose attention depends on more than `position_ids` and the mask, and encoders, which count
# positions in another way or see later tokens.
_OWN_POSITIONS = {
    *("gpt_neo", "moshi"),
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
    *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roformer"),
    *("xlm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}


def context_of(config: PreTrainedConfig) -> int | None:
    """Return the length of the longest sequence that a model's positions allow.

    None if its configuration gives no limit. A model with longrope is limited to the range of its
    short factors: a change to the long ones would change every position, at a time that depends on
    drafts and other rows. Raises ValueError for more than MAX_POSITIONS.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # Either the parameters of all layers, or those of each layer type.
    limits.extend(
        part.get("original_max_position_embeddings")
        for part in (rope, *rope.values())
        if isinstance(part, dict) and part.get("rope_type") == "longrope"
    )
    context = min((limit for limit in limits if limit), default=None)
    if isinstance(context, int | float) and context > MAX_POSITIONS:
        raise ValueError(
            f"the configuration claims {context} positions; at most {MAX_POSITIONS} are supported"
        )
    return context


def window_of(config: PreTrainedConfig) -> int | None:
    """Return the window of the layers with sliding attention, in positions; None without one.

    Without layer types these are all layers.
    """
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    return getattr(config, "sliding_window", None) if "sliding_attention" in kinds else None


def check_model(model: PreTrainedModel) -> None:
    """Raise ValueError for a model that cannot roll back its cache or take tree masks."""
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    accepted = inspect.signature(model.forward).parameters
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; it must be a decoder-only model")
    if getattr(model, "_is_stateful", False) or not kinds <= _ATTENTION:
        raise ValueError(
            f"{name} has layers that cannot roll back: {sorted(kinds - _ATTENTION) or 'recurrent'}"
        )
    if getattr(config, "alibi", False) or config.model_type in _OWN_POSITIONS:
        raise ValueError(
            f"{name} counts positions by its cache or in its own way (ALiBi, local attention, "
            "encoder as decoder): drafts and batches would change its output"
        )
    if "position_ids" not in accepted or cache_argument(model.forward) is None:
        raise ValueError(f"{name}.forward takes no position_ids or no cache; it cannot run drafts")
    if model.config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"attention implementation {model.config._attn_implementation!r} takes no tree masks; "
            'load the model with attn_implementation="sdpa" or "eager"'
        )
