"""A draft model's LM head for the hot tokens and those in a sequence's own text.

A small draft model spends most of its time on the logits of tokens that hardly ever come. Leaving
them out is lossless: their q is 0, and the acceptance rule uses that q. FR-Spec (arXiv 2502.14856)
keeps the most frequent tokens; adding those of the text is ours.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from forerun.backends import prepare
from forerun.backends.chain import fused_chain
from forerun.backends.heads import HeadRows
from forerun.backends.panels import Product, product
from forerun.files import write_text
from forerun.model.causal_lm import CausalLM
from forerun.zoo import HOT_FILE

# A text's further tokens that are kept. Many would cost as much as the whole LM head.
_MAX_EXTRA = 256


class HotHead:
    """Compute logits from hidden states: -inf for tokens that are neither hot nor in the text.

    A model's own cap on its logits is not applied.

    Attributes:
        tokens: [S] the hot tokens.
        vocab_size: the number V of all tokens.
        product: maps states [n, d] to logits [n, S] of the hot tokens.
    """

    def __init__(
        self,
        rows: Callable[[Tensor], tuple[Tensor, Tensor]],
        vocab_size: int,
        tokens: Tensor,
        scale: float = 1.0,
    ) -> None:
        """Build a head.

        Args:
            rows: returns the weight [n, d] and bias [n] of tokens [n].
            vocab_size: the number V of all tokens.
            tokens: [S] the hot tokens.
            scale: a factor of all logits.
        """
        self.tokens = tokens
        self.vocab_size = vocab_size
        self._head = rows
        self._scale = scale
        is_hot = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, tokens.cpu(), True)
        self._is_hot: list[bool] = is_hot.tolist()
        weight, bias = self._scaled(tokens)
        self.product: Product = product(weight, bias if bias.any() else None, in_8_bits=True)
        # By sequence: the tokens of its text that are not hot, oldest first.
        self._extra: dict[int, dict[int, None]] = {}
        # By sequence: these tokens, their weight and their bias, once they were needed.
        self._rows: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def _scaled(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = self._head(tokens)
        return self._scale * weight, self._scale * bias

    def fresh(self) -> HotHead:
        """Return the same head without any sequences."""
        other = copy.copy(self)
        other._extra = {}
        other._rows = {}
        return other

    def add_context_tokens(self, id: int, tokens: Iterable[int]) -> None:
        """Add tokens of a sequence's text. Of those that are not hot the last ones are kept."""
        extra = self._extra.setdefault(id, {})
        for token in tokens:
            if not self._is_hot[token] and token not in extra:
                extra[token] = None
                self._rows.pop(id, None)
        while len(extra) > _MAX_EXTRA:
            del extra[next(iter(extra))]

    def context_tokens(self, id: int) -> list[int]:
        """Return the kept tokens of a sequence's text that are not hot."""
        return list(self._extra.get(id, ()))

    def drop(self, id: int) -> None:
        """Forget a sequence's text."""
        self._extra.pop(id, None)
        self._rows.pop(id, None)

    def reset(self) -> None:
        """Forget all sequences' texts."""
        self._extra.clear()
        self._rows.clear()

    def __call__(self, states: Sequence[Tensor], ids: Sequence[int]) -> Tensor:
        """Return logits [n, V] in float32 of states [N_r, d] of each sequence, n = sum of N_r."""
        whole = torch.cat(list(states))
        logits = torch.full((len(whole), self.vocab_size), -torch.inf, device=whole.device)
        logits.index_copy_(1, self.tokens, self.product(whole).float())
        parts = logits.split([len(rows) for rows in states])
        for rows, id, part in zip(states, ids, parts, strict=True):
            if self._extra.get(id):
                extra, weight, bias = self._rows.get(id) or self._gather(id)
                # One product per sequence, so that its bits do not depend on its neighbours.
                part.index_copy_(1, extra, rows.float() @ weight + bias)
        return logits

    def _gather(self, id: int) -> tuple[Tensor, Tensor, Tensor]:
        extra = torch.tensor(self.context_tokens(id), device=self.tokens.device)
        weight, bias = self._scaled(extra)
        self._rows[id] = extra, weight.float().T.contiguous(), bias.float()
        return self._rows[id]


def prepare_draft(
    model: PreTrainedModel, folder: str | Path | None, count: int | None, fast: bool = True
) -> CausalLM:
    """Return `prepare(model, fast)`, with a hot head if one is asked for.

    The draft's folder or `count` may ask for it (`hot_tokens`). A `folder` that is a string, such
    as a hub id, does not.
    """
    plain = CausalLM(model)
    tokens = hot_tokens(folder if isinstance(folder, Path) else None, count, plain.vocab_size)
    hot = None
    if tokens is not None:
        config = model.config.get_text_config(decoder=True)
        rows = HeadRows(plain, config.hidden_size)
        hot = HotHead(rows, plain.vocab_size, tokens.to(plain.device), logit_scale(config))
    ready = prepare(model, fast)
    return ready.draft_with(hot, fused_chain(ready.backend, hot))


def logit_scale(config: PreTrainedConfig) -> float:
    """Return the factor of a model's logits: Cohere's factor, or Granite's divisor."""
    factor = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    return float(factor or 1 / (divisor or 1))


def save_hot(folder: Path, tokens: Tensor) -> None:
    """Write the hot tokens [S] of a draft model, most frequent first, into its folder."""
    write_text(folder / HOT_FILE, json.dumps(tokens.tolist()) + "\n")


def hot_tokens(folder: Path | None, count: int | None, vocab_size: int) -> Tensor | None:
    """Return the `count` most frequent tokens [S] of a draft model, or None for a whole LM head.

    First come those of the file in its folder, then the lowest ids, which a BPE tokenizer merged
    first. A count of None takes the file's tokens, if there is a file. A count of 0 asks for a
    whole LM head.

    Raises:
        ValueError: the count is above `vocab_size`, or the file is damaged.
    """
    known = None if folder is None else _stored_tokens(folder / HOT_FILE, vocab_size)
    if count is None:
        return known
    if not 0 <= count <= vocab_size:
        raise ValueError(f"draft_vocabulary must be 0 to {vocab_size}, not {count}")
    if not count:
        return None
    order = torch.arange(vocab_size)
    if known is not None:
        is_left = torch.ones(vocab_size, dtype=torch.bool).index_fill_(0, known, False)
        order = torch.cat([known, order[is_left]])
    return order[:count]


def _stored_tokens(path: Path, vocab_size: int) -> Tensor | None:
    """Return the hot tokens in a file, or None without the file."""
    if not path.is_file():
        return None
    try:
        tokens = torch.tensor(json.loads(path.read_bytes()), dtype=torch.long)
    except (ValueError, TypeError, RuntimeError, RecursionError, OSError) as error:
        raise ValueError(f"{path} holds no hot tokens: {str(error).splitlines()[0]}") from None
    if tokens.ndim != 1 or not len(tokens) or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"{path} must hold token ids from 0 to {vocab_size - 1}")
    if len(tokens.unique()) < len(tokens):
        raise ValueError(f"{path} holds a token twice")
    return tokens
