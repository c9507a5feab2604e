"""A draft for any target: a small Llama over the target's vocabulary, distilled on the target's own output."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.loading import load_model, load_tokenizer
from forerun.model import CausalLM, context_of
from forerun.nn.heads import hot_set
from forerun.runtime.hot import save_hot
from forerun.train.chats import check_chats
from forerun.train.data import read_texts, tokenize
from forerun.train.distill import distill, distill_chats
from forerun.train.lm import new_llama
from forerun.train.loop import TrainConfig, claim
from forerun.train.own_output import own_output
from forerun.train.texts import check_sources, learnt_and_held


@torch.no_grad()
def begin_embeddings(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Gives a new draft the target's embeddings along their main directions, at the scale of its own: tokens that are
    alike for the target are so for the draft from the start (ours). Does nothing where the target's are narrower."""
    own, theirs = (model.get_input_embeddings().get_parameter("weight") for model in (draft, target))
    if theirs.shape[-1] >= own.shape[-1]:
        wide = theirs.float()
        _, directions = torch.linalg.eigh(wide.T @ wide)  # smallest first
        seen = wide @ directions[:, -own.shape[-1] :]
        own.copy_(seen * (own.std() / seen.std()))


def train_draft(
    target: str,
    data: Sequence[str],
    out: Path,
    config: TrainConfig,
    *,
    chats: Path | None = None,
    init: str | None = None,
    layers: int = 2,
    width: int = 192,
    sequences: int = 3072,
    hot: float = 1.0,
    device: str | None = None,
    trust_remote_code: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Makes the target's own output from prompts in `data`, distils a draft on it, and saves it in `out`. `chats`, a
    folder of conversations (`forerun.train.chat_data`), take the place of both.

    With `hot` below 1 the draft is told to propose that share of the vocabulary only, the tokens that are most frequent
    in the target's output, and those of a text (`forerun.runtime.hot`).

    `out` then loads as a draft; its folder `work` holds what a stopped run needs to go on. Raises ValueError for
    data that is missing or too little, an `init` with another vocabulary, windows longer than the target's context,
    and an `out` that holds another run.
    """
    if not 0 < hot <= 1:
        raise ValueError(f"hot must be above 0 and at most 1, not {hot}")
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(target, trust_remote_code=trust_remote_code)
    check_sources(data, chats)
    if chats is not None:
        check_chats(chats, tokenizer, target)
    made = None if chats is None else learnt_and_held(chats, config.length)
    stream = np.zeros(0)
    if made is None:
        stream = tokenize(tokenizer, list(read_texts(data)), config.seed)
        if len(stream) < 4 * config.length:
            raise ValueError(f"--data holds {len(stream)} tokens; give at least {4 * config.length}")
    big = load_model(target, "target", device=device, trust_remote_code=trust_remote_code, plain=True)
    context = context_of(big.config.get_text_config(decoder=True)) or 4096
    if config.length >= context:
        raise ValueError(f"--length {config.length} does not fit the target's context of {context}; give less")
    if init is None:
        mlp = width * 8 // 3 // 16 * 16
        vocabulary = big.config.get_text_config(decoder=True).vocab_size  # may be padded beyond the tokenizer's
        draft: PreTrainedModel = new_llama(
            tokenizer, width, layers, width // 64, mlp, context, config.seed, vocabulary=vocabulary
        )
        begin_embeddings(draft, big)
    else:
        draft = load_model(
            init, "draft", dtype="float32", device=device, trust_remote_code=trust_remote_code, plain=True
        )
        if draft.config.vocab_size != big.config.vocab_size:
            raise ValueError(
                f"{init} has a vocabulary of {draft.config.vocab_size} entries, {target} of {big.config.vocab_size}"
            )
    mark: dict[str, Any] = {
        "target": target,
        "data": list(data),
        "init": init,
        "layers": layers,
        "width": width,
        "sequences": sequences,
    }
    if hot < 1:
        mark |= {"hot": hot}
    if chats is not None:
        mark |= {"chats": str(chats), "texts": made[0].digest if made is not None else None}
    claim(out / "work", json.dumps(mark | asdict(config) | {"compile": None}, sort_keys=True))
    draft.to(big.device)  # type: ignore[arg-type]
    if made is not None:
        learnt, held = made
        counts = learnt.frequencies(draft.config.vocab_size)
        tokens, share = hot_set(counts, max(1, round(hot * len(counts))))
        only = tokens if hot < 1 else None
        distill_chats(CausalLM(big.requires_grad_(False)), draft, learnt, held, config, out / "work/draft", only, say)
    else:
        own = own_output(
            big,
            stream,
            out / "work" / "own-output",
            sequences=sequences,
            length=config.length,
            seed=config.seed,
            say=say,
        )
        counts = torch.from_numpy(np.bincount(own.flatten(), minlength=draft.config.vocab_size))
        tokens, share = hot_set(counts, max(1, round(hot * len(counts))))
        distill(big, draft, own, stream, config, out / "work" / "draft", say=say)
    draft.save_pretrained(out)
    tokenizer.save_pretrained(out)
    if hot < 1:
        save_hot(out, tokens)
        say(f"its {len(tokens)} tokens are {share:.2%} of the output that it learnt from")
    say(f"the draft is in {out}: forerun generate --target {target} --draft {out}")
