"""A draft's LM head at a part of its vocabulary: the hot tokens, and those that stand in a sequence's own text.

A small draft spends most of its time on logits of tokens that hardly ever come. To leave them out is lossless: the
draft gives them no probability, and the acceptance rule is told so. FR-Spec (arXiv 2502.14856) keeps the most frequent
tokens; to add those of the text is ours.
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
from forerun.backends.packed import Product, product
from forerun.files import write_text
from forerun.model.causal_lm import CausalLM
from forerun.zoo import HOT_FILE


class HotHead:
    """Logits from hidden states, -inf for tokens that are neither hot nor in the sequence's text. A model's own cap on
    its logits is left out.

    Attributes:
        tokens: [S] the hot ones.
        most: tokens of a text that are kept: more of them would take as long as a whole head.
    """

    most = 256

    def __init__(
        self, rows: Callable[[Tensor], tuple[Tensor, Tensor]], vocab_size: int, tokens: Tensor, scale: float = 1.0
    ) -> None:
        """`rows`: weight [n, d] and bias [n] of tokens [n], which are multiplied by `scale`."""
        self.tokens, self.vocab_size, self._head, self._scale = tokens, vocab_size, rows, scale
        self._is_hot = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, tokens.cpu(), True).tolist()
        weight, bias = self._scaled(tokens)
        self.product: Product = product(weight, bias if bias.any() else None, one_row=True, few=True)
        self._met: dict[int, dict[int, None]] = {}  # by sequence, the tokens of its text that are not hot
        self._rows: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # these tokens, their weight and bias

    def _scaled(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = self._head(tokens)
        return self._scale * weight, self._scale * bias

    def fresh(self) -> HotHead:
        """The same head, which knows no text."""
        other = copy.copy(self)
        other._met, other._rows = {}, {}
        return other

    def add_context_tokens(self, id: int, tokens: Iterable[int]) -> None:
        """Adds tokens of a sequence's text. The last `most` of those that are not hot are kept."""
        own = self._met.setdefault(id, {})
        for token in tokens:
            if not self._is_hot[token] and token not in own:
                own[token] = None
                self._rows.pop(id, None)
        while len(own) > self.most:
            del own[next(iter(own))]

    def context_tokens(self, id: int) -> list[int]:
        """Those tokens of a sequence."""
        return list(self._met.get(id, ()))

    def drop(self, id: int) -> None:
        """Forgets a sequence's text."""
        self._met.pop(id, None)
        self._rows.pop(id, None)

    def reset(self) -> None:
        self._met.clear()
        self._rows.clear()

    def __call__(self, states: Sequence[Tensor], ids: Sequence[int]) -> Tensor:
        """[n, V] float32 from the states [N_r, d] of each of these sequences."""
        whole = torch.cat(list(states))
        logits = torch.full((len(whole), self.vocab_size), -torch.inf, device=whole.device)
        logits.index_copy_(1, self.tokens, self.product(whole).float())
        for own, id, part in zip(states, ids, logits.split(list(map(len, states))), strict=True):
            if self._met.get(id):
                met, weight, bias = self._rows.get(id) or self._gather(id)
                # A row's own product, so that its bits do not depend on its neighbours.
                part.index_copy_(1, met, own.float() @ weight + bias)
        return logits

    def _gather(self, id: int) -> tuple[Tensor, Tensor, Tensor]:
        met = torch.tensor(self.context_tokens(id), device=self.tokens.device)
        weight, bias = self._scaled(met)
        self._rows[id] = met, weight.float().T.contiguous(), bias.float()
        return self._rows[id]


def prepare_draft(model: PreTrainedModel, folder: str | Path | None, count: int | None, **how: bool) -> CausalLM:
    """`prepare(model, **how)`, with a hot head if the draft's folder or `count` asks for it (`hot_tokens`). `folder`
    may be a hub id, which asks for nothing."""
    plain = CausalLM(model)
    tokens = hot_tokens(folder if isinstance(folder, Path) else None, count, plain.vocab_size)
    hot = None
    if tokens is not None:
        config = model.config.get_text_config(decoder=True)
        rows = HeadRows(plain, config.hidden_size)
        hot = HotHead(rows, plain.vocab_size, tokens.to(plain.device), logit_scale(config))
    ready = prepare(model, **how)
    return ready.draft_with(hot, fused_chain(ready.backend, hot))


def logit_scale(config: PreTrainedConfig) -> float:
    """What a model multiplies its LM head's logits with: Cohere's form and Granite's."""
    return getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)


def save_hot(folder: Path, tokens: Tensor) -> None:
    """Writes the hot tokens [S] of a draft, most frequent first, into its folder."""
    write_text(folder / HOT_FILE, json.dumps(tokens.tolist()) + "\n")


def hot_tokens(folder: Path | None, count: int | None, vocab_size: int) -> Tensor | None:
    """The `count` most frequent tokens of a draft, by what its folder says, else those with the lowest ids, which a BPE
    tokenizer learnt first. A count of None is as many as the folder names, and None where it names none; 0 is None.

    Raises ValueError for a count above `vocab_size` and a damaged file.
    """
    path = None if folder is None else folder / HOT_FILE
    known = None
    if path is not None and path.is_file():
        try:
            known = torch.tensor(json.loads(path.read_bytes()), dtype=torch.long)
        except (ValueError, TypeError, RuntimeError, RecursionError, OSError) as error:
            raise ValueError(f"{path} holds no hot tokens: {str(error).splitlines()[0]}") from None
        if known.ndim != 1 or not len(known) or known.min() < 0 or known.max() >= vocab_size:
            raise ValueError(f"{path} holds other tokens than those of a vocabulary of {vocab_size}")
        if len(known.unique()) < len(known):
            raise ValueError(f"{path} holds a token twice")
    if count is None:
        return known
    if not 0 <= count <= vocab_size:
        raise ValueError(f"draft_vocabulary must be 0 to {vocab_size}, not {count}")
    if not count:
        return None
    order = torch.arange(vocab_size)
    if known is not None:  # the file's first, then the others
        rest = torch.ones(vocab_size, dtype=torch.bool).index_fill_(0, known, False)
        order = torch.cat([known, order[rest]])
    return order[:count]
