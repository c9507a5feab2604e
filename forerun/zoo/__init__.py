"""The embedded pair: a small target and draft, trained on the standard library's source, with their tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).parent / "weights"
EMBEDDED = "embedded"


def embedded_tokenizer():
    """The pair's byte-level BPE tokenizer."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(FOLDER / "tokenizer")


def embedded_model(part: Literal["target", "draft"]):
    """The embedded target or draft as a float32 LlamaForCausalLM."""
    from forerun.zoo.quantise import load_quantised

    return load_quantised(FOLDER / part)
