"""Fingerprints, which identify a model whatever its dtype."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Return a model's sizes and a number from each of a few of its weights.

    The number is None for a weight that is quantised or cannot be read.
    """
    config = model.config.get_text_config(decoder=True)
    shape = {
        name: getattr(config, name, None)
        for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
    }
    weights = [weight for _, weight in sorted(_weights(model).items(), key=lambda item: item[0])]
    chosen = weights[:: max(1, len(weights) // 16)]
    return shape | {"weights": [_number(weight) for weight in chosen]}


def _weights(model: PreTrainedModel) -> dict[str, Tensor | None]:
    """Return {name: weight}; None for a layer that stores its weight in another form.

    Such layers are linear or embeddings.
    """
    weights: dict[str, Tensor | None] = {
        name: weight
        for name, weight in model.named_parameters()
        if weight.numel() and not weight.is_meta
    }
    # A tied LM head has the weight of the embeddings, which are among the modules already.
    tied = model.get_output_embeddings() if model.config.tie_word_embeddings else None
    for path, module in model.named_modules():
        is_plain = isinstance(getattr(module, "weight", None), nn.Parameter)
        has_weight = hasattr(module, "in_features") or hasattr(module, "num_embeddings")
        if has_weight and not is_plain and module is not tied:
            weights[f"{path}.weight"] = None
            bias = getattr(module, "bias", None)
            if isinstance(bias, Tensor) and f"{path}.bias" not in weights:
                weights[f"{path}.bias"] = bias
    return weights


def _number(weight: Tensor | None) -> float | None:
    """Return one rounded element of a weight, or None if it cannot be read."""
    if weight is None or not weight.is_floating_point() or type(weight.data) is not Tensor:
        return None
    try:
        return round(float(weight.detach().flatten()[weight.numel() // 3].float()), 6)
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def same_model(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two fingerprints are of one model, whose dtypes may differ.

    Weights of which one fingerprint has no number are ignored.
    """
    if {**one, "weights": None} != {**other, "weights": None}:
        return False
    if len(one["weights"]) != len(other["weights"]):
        return False
    pairs = zip(one["weights"], other["weights"], strict=True)
    return all(
        abs(a - b) <= 0.01 * abs(a) + 1e-5 for a, b in pairs if a is not None and b is not None
    )
