"""Models, tokenizers and prompts from what users name them by, with one clear error for what cannot be had."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from forerun.zoo import resolve
from forerun.zoo.quantise import WEIGHTS, load_quantised

Prompt = str | Sequence[int]


def encode(
    prompts: Prompt | Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase | None,
    context: int | None,
    vocab_size: int,
) -> tuple[bool, list[list[int]]]:
    """Whether it is one prompt, and the token ids of each; raises ValueError for what cannot be decoded."""
    if hasattr(prompts, "tolist"):  # tensors and arrays; without padding, which would count as prompt
        prompts = prompts.tolist()
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    many: Sequence[Any] = [prompts] if single else prompts
    if not many:
        raise ValueError("no prompts were given")
    rows = []
    for i, prompt in enumerate(many):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError("text prompts need a tokenizer; give token ids or tokenizer=...")
            prompt = tokenizer(prompt)["input_ids"]
        row = [int(token) for token in prompt]
        if not row:
            raise ValueError(f"prompt {i} is empty; it needs at least one token")
        if min(row) < 0 or max(row) >= vocab_size:
            raise ValueError(f"prompt {i} has token ids outside 0..{vocab_size - 1}")
        if context is not None and len(row) >= context:
            raise ValueError(
                f"prompt {i} has {len(row)} tokens; the target's context of {context} leaves room for "
                f"at most {context - 1}"
            )
        rows.append(row)
    return single, rows


def load_model(
    source: str | Path | PreTrainedModel,
    part: str,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model of a hub id or folder, in float32 on a CPU and as the checkpoint has it elsewhere by default.

    `part` ("target" or "draft") says which of the pair "embedded" means, and names it in errors (ValueError).
    """
    if not isinstance(source, str | Path):
        return source
    source = resolve(source, part)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"cannot use device {device!r}: {_first_line(error)}") from None
    dtype = dtype or (torch.float32 if device == "cpu" else "auto")
    if isinstance(dtype, str) and dtype != "auto":
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"unknown dtype {dtype!r}; there are float32, bfloat16, float16 and auto")
        dtype = getattr(torch, dtype)
    if (Path(source) / WEIGHTS).exists():
        restored: Any = load_quantised(Path(source))
        return restored.to(device=device, dtype=torch.float32 if dtype == "auto" else dtype)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"cannot load {part} {str(source)!r}: {_first_line(error)}") from error
    return model.to(device)


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a hub id or folder; raises ValueError where there is none."""
    try:
        return AutoTokenizer.from_pretrained(resolve(source, "target"), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load the tokenizer of {str(source)!r}: {_first_line(error)}") from error


def check_prompts(
    target: str | Path, prompts: Prompt | Sequence[Prompt], *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The target's tokenizer; raises ValueError where decoding would for the prompts' sake, without loading weights."""
    source = resolve(target, "target")
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code).get_text_config(decoder=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load target {str(target)!r}: {_first_line(error)}") from error
    encode(prompts, tokenizer, getattr(config, "max_position_embeddings", None), config.vocab_size)
    return tokenizer


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
