"""Fingerprints, which identify a model whatever its dtype."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Return a model's sizes and a few of its weights. A weight that is quantised or cannot be read is None."""
    config = model.config.get_text_config(decoder=True)
    shape = {
        name: getattr(config, name, None)
        for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
    }
    weights = [weight for _, weight in sorted(_weights(model).items(), key=lambda item: item[0])]
    chosen = weights[:: max(1, len(weights) // 16)]
    return shape | {"weights": [_number(weight) for weight in chosen]}


def _weights(model: PreTrainedModel) -> dict[str, Tensor | None]:
    """Return {name: weight}; None for linear layers and embeddings that store theirs in another form."""
    found: dict[str, Tensor | None] = {
        name: weight
        for name, weight in model.named_parameters()
        if weight.numel() and not weight.is_meta
    }
    tied = (
        model.get_output_embeddings() if model.config.tie_word_embeddings else None
    )  # its embeddings have the same weight
    for path, module in model.named_modules():
        plain = isinstance(getattr(module, "weight", None), nn.Parameter)
        stored = hasattr(module, "in_features") or hasattr(module, "num_embeddings")
        if stored and not plain and module is not tied:
            found[f"{path}.weight"] = None
            bias = getattr(module, "bias", None)
            if isinstance(bias, Tensor) and f"{path}.bias" not in found:
                found[f"{path}.bias"] = bias
    return found


def _number(weight: Tensor | None) -> float | None:
    if weight is None or not weight.is_floating_point() or type(weight.data) is not Tensor:
        return None
    try:
        return round(float(weight.detach().flatten()[weight.numel() // 3].float()), 6)
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def same_model(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two fingerprints are of one model, perhaps in two dtypes. Weights that one lacks are ignored."""
    if {**one, "weights": None} != {**other, "weights": None} or len(one["weights"]) != len(
        other["weights"]
    ):
        return False
    pairs = zip(one["weights"], other["weights"], strict=True)
    return all(
        abs(a - b) <= 0.01 * abs(a) + 1e-5 for a, b in pairs if a is not None and b is not None
    )
