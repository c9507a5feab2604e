"""A draft model's LM head for a part of the vocabulary: the hot tokens, and those in a sequence's own text.

A small draft model spends most of its time on logits of tokens that hardly ever come. Leaving them out is lossless:
their q is 0, and the acceptance rule uses that q. FR-Spec (arXiv 2502.14856) keeps the most frequent tokens; adding
those of the text is ours.
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


class HotHead:
    """Compute logits from hidden states: -inf for tokens that are neither hot nor in the sequence's text. A model's own
    cap on its logits is not applied.

    Attributes:
        tokens: [S] the hot tokens.
        most: limit of further tokens kept for each text; many would cost as much as the whole LM head.
    """

    most = 256

    def __init__(
        self,
        rows: Callable[[Tensor], tuple[Tensor, Tensor]],
        vocab_size: int,
        tokens: Tensor,
        scale: float = 1.0,
    ) -> None:
        """Build a head of `rows`, which returns weight [n, d] and bias [n] of tokens [n], with logits times `scale`."""
        self.tokens, self.vocab_size, self._head, self._scale = tokens, vocab_size, rows, scale
        self._is_hot = (
            torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, tokens.cpu(), True).tolist()
        )
        weight, bias = self._scaled(tokens)
        self.product: Product = product(weight, bias if bias.any() else None, few=True)
        self._extra: dict[
            int, dict[int, None]
        ] = {}  # by sequence, tokens of its text that are not hot, in order
        self._rows: dict[
            int, tuple[Tensor, Tensor, Tensor]
        ] = {}  # these tokens, their weight and bias

    def _scaled(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = self._head(tokens)
        return self._scale * weight, self._scale * bias

    def fresh(self) -> HotHead:
        """Return the same head without any sequences."""
        other = copy.copy(self)
        other._extra, other._rows = {}, {}
        return other

    def add_context_tokens(self, id: int, tokens: Iterable[int]) -> None:
        """Add tokens of a sequence's text. The last `most` of them that are not hot are kept."""
        own = self._extra.setdefault(id, {})
        for token in tokens:
            if not self._is_hot[token] and token not in own:
                own[token] = None
                self._rows.pop(id, None)
        while len(own) > self.most:
            del own[next(iter(own))]

    def context_tokens(self, id: int) -> list[int]:
        """Return the kept tokens of a sequence's text that are not hot."""
        return list(self._extra.get(id, ()))

    def drop(self, id: int) -> None:
        """Forget a sequence's text."""
        self._extra.pop(id, None)
        self._rows.pop(id, None)

    def reset(self) -> None:
        self._extra.clear()
        self._rows.clear()

    def __call__(self, states: Sequence[Tensor], ids: Sequence[int]) -> Tensor:
        """Return logits [n, V] in float32 of states [N_r, d] of each sequence, n = sum of N_r."""
        whole = torch.cat(list(states))
        logits = torch.full((len(whole), self.vocab_size), -torch.inf, device=whole.device)
        logits.index_copy_(1, self.tokens, self.product(whole).float())
        for own, id, part in zip(states, ids, logits.split(list(map(len, states))), strict=True):
            if self._extra.get(id):
                extra, weight, bias = self._rows.get(id) or self._gather(id)
                # One product a row, so that its bits do not depend on its neighbours.
                part.index_copy_(1, extra, own.float() @ weight + bias)
        return logits

    def _gather(self, id: int) -> tuple[Tensor, Tensor, Tensor]:
        extra = torch.tensor(self.context_tokens(id), device=self.tokens.device)
        weight, bias = self._scaled(extra)
        self._rows[id] = extra, weight.float().T.contiguous(), bias.float()
        return self._rows[id]


def prepare_draft(
    model: PreTrainedModel, folder: str | Path | None, count: int | None, fast: bool = True
) -> CausalLM:
    """Return `prepare(model, fast)`, with a hot head if the draft's folder or `count` asks for it (`hot_tokens`). A
    hub id as `folder` does not."""
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
    """Return the factor of a model's logits, in Cohere's form or Granite's."""
    return getattr(config, "logit_scale", None) or 1 / (
        getattr(config, "logits_scaling", None) or 1
    )


def save_hot(folder: Path, tokens: Tensor) -> None:
    """Write the hot tokens [S] of a draft model, most frequent first, into its folder."""
    write_text(folder / HOT_FILE, json.dumps(tokens.tolist()) + "\n")


def hot_tokens(folder: Path | None, count: int | None, vocab_size: int) -> Tensor | None:
    """Return the `count` most frequent tokens [S] of a draft model, or None for a whole LM head (a count of 0).

    First come those of the file in its folder, then the lowest ids, which a BPE tokenizer merged first. A count of
    None takes the file's tokens, if there is one. Raises ValueError for a count above `vocab_size` and a damaged file.
    """
    path = None if folder is None else folder / HOT_FILE
    known = None
    if path is not None and path.is_file():
        try:
            known = torch.tensor(json.loads(path.read_bytes()), dtype=torch.long)
        except (ValueError, TypeError, RuntimeError, RecursionError, OSError) as error:
            raise ValueError(f"{path} holds no hot tokens: {str(error).splitlines()[0]}") from None
        if known.ndim != 1 or not len(known) or known.min() < 0 or known.max() >= vocab_size:
            raise ValueError(f"{path} must hold token ids from 0 to {vocab_size - 1}")
        if len(known.unique()) < len(known):
            raise ValueError(f"{path} holds a token twice")
    if count is None:
        return known
    if not 0 <= count <= vocab_size:
        raise ValueError(f"draft_vocabulary must be 0 to {vocab_size}, not {count}")
    if not count:
        return None
    order = torch.arange(vocab_size)
    if known is not None:  # the file's first, then the remaining ones
        rest = torch.ones(vocab_size, dtype=torch.bool).index_fill_(0, known, False)
        order = torch.cat([known, order[rest]])
    return order[:count]
