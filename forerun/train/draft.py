"""A draft for any target: a small Llama over the target's vocabulary, distilled on the target's own output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from forerun.loading import load_model, load_tokenizer
from forerun.train.data import read_texts, tokenize
from forerun.train.distill import distill
from forerun.train.loop import TrainConfig
from forerun.train.own_output import own_output


def new_draft(target: PreTrainedModel, layers: int, width: int, seed: int) -> LlamaForCausalLM:
    """A fresh Llama with tied embeddings, heads of 64 and the target's vocabulary, context and special tokens."""
    config = target.config.get_text_config(decoder=True)
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 64,
            head_dim=64,
            intermediate_size=width * 8 // 3 // 16 * 16,
            max_position_embeddings=getattr(config, "max_position_embeddings", 4096),
            tie_word_embeddings=True,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        )
    )


def train_draft(
    target: str,
    data: Sequence[str],
    out: Path,
    config: TrainConfig,
    *,
    init: str | None = None,
    layers: int = 2,
    width: int = 192,
    sequences: int = 3072,
    device: str | None = None,
    trust_remote_code: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Makes the target's own output from prompts in `data`, distils a draft on it, and saves it in `out`.

    `out` then loads as a draft; its folder `work` holds what a stopped run needs to go on. Raises ValueError for
    data that is missing or too little, and for an `init` with another vocabulary.
    """
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(target, trust_remote_code=trust_remote_code)
    stream = tokenize(tokenizer, list(read_texts(data)), config.seed)
    if len(stream) < 4 * config.length:
        raise ValueError(f"--data holds {len(stream)} tokens; give at least {4 * config.length}")
    big = load_model(target, "target", device=device, trust_remote_code=trust_remote_code)
    if init is None:
        draft: PreTrainedModel = new_draft(big, layers, width, config.seed)
    else:
        draft = load_model(init, "draft", dtype="float32", device=device, trust_remote_code=trust_remote_code)
        if draft.config.vocab_size != big.config.vocab_size:
            raise ValueError(
                f"{init} has a vocabulary of {draft.config.vocab_size} entries, {target} of {big.config.vocab_size}"
            )
    own = own_output(
        big,
        stream,
        out / "work" / "own-output",
        sequences=sequences,
        length=config.length,
        rows=min(64, sequences),
        seed=config.seed,
        say=say,
    )
    distill(big, draft.to(big.device), own, stream, config, out / "work" / "draft", say=say)  # type: ignore[arg-type]
    draft.save_pretrained(out)
    tokenizer.save_pretrained(out)
    say(f"the draft is in {out}: forerun generate --target {target} --draft {out}")
