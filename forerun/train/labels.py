"""The frozen target's distributions over texts to train on.

They are computed once, kept in files, and the same for all recipes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from forerun.model.causal_lm import CausalLM
from forerun.train.loop import save_missing
from forerun.train.run import Run
from forerun.train.texts import Texts

TOP = 64  # tokens of a distribution; the rest of the vocabulary has next to no probability
SHARD = 64  # texts per file
LOGITS = 1 << 26  # the most logits of one forward
LOGIT_ROWS = 128  # positions whose logits stay in a processor's cache while they are used


class TopProbs(NamedTuple):
    """Distributions at n positions.

    Attributes:
        tokens: [n, k] the k most probable tokens, the most probable first.
        probs: [n, k] float32, their probabilities, which sum to nearly 1.
    """

    tokens: Tensor
    probs: Tensor

    def at(self, positions: Tensor | slice) -> TopProbs:
        """Return the distributions at some of the positions."""
        return TopProbs(self.tokens[positions], self.probs[positions])

    def within(self, hot: Tensor, vocabulary: int) -> TopProbs:
        """Return the same distributions with tokens numbered by their place in `hot` [S].

        Tokens outside `hot` have the probability 0.
        """
        places = torch.full((vocabulary,), -1, device=hot.device)
        places[hot] = torch.arange(len(hot), device=hot.device)
        numbers = places[self.tokens]
        return TopProbs(numbers.clamp(min=0), self.probs * (numbers >= 0))


def top_probs(logits: Tensor) -> TopProbs:
    """Return the distributions of logits [n, V]."""
    best, tokens = logits.float().topk(min(TOP, logits.shape[-1]))
    return TopProbs(tokens, (best - logits.float().logsumexp(-1, keepdim=True)).exp())


def cross_entropy(logits: Tensor, wanted: TopProbs) -> Tensor:
    """Return the summed cross-entropy of logits [n, S] with distributions over the same tokens."""
    return -(wanted.probs * logits.log_softmax(-1).gather(-1, wanted.tokens)).sum()


class Labels:
    """The target's labels of texts, read from files on demand."""

    def __init__(self, texts: Texts, paths: list[Path], device: torch.device) -> None:
        self._files = [safe_open(path, "pt").__enter__() for path in paths]
        self.texts = texts.to(device)
        self._device = device
        counts = texts.ends - texts.begins
        # Where each text begins in its file, and how many rows it has there.
        self._state_starts = _starts_in_files(texts.ends)
        self._state_counts = texts.ends.tolist()
        self._prob_starts = _starts_in_files(counts)
        self._prob_counts = counts.tolist()

    def _read(self, name: str, row: int, start: int, count: int) -> Tensor:
        part: Tensor = self._files[row // SHARD].get_slice(name)[start : start + count]
        return part

    def states(self, rows: Tensor) -> Tensor:
        """Return the LM head's inputs [B, T, d] over texts [B], no wider than the longest text."""
        parts = [
            self._read("states", row, self._state_starts[row], self._state_counts[row])
            for row in rows.tolist()
        ]
        return pad_sequence(parts, batch_first=True).to(self._device).float()

    def probs(self, rows: Tensor) -> TopProbs:
        """Return the distributions at the positions of texts [B] that count, text by text."""
        tokens = self._read_top("tokens", rows).to(self._device).long()
        probs = self._read_top("probs", rows).to(self._device).float()
        return TopProbs(tokens, probs)

    def _read_top(self, name: str, rows: Tensor) -> Tensor:
        parts = [
            self._read(name, row, self._prob_starts[row], self._prob_counts[row])
            for row in rows.tolist()
        ]
        return torch.cat(parts)


def _starts_in_files(counts: Tensor) -> list[int]:
    """Return where each text begins in its file, if it has `counts` [N] rows there."""
    starts = [part.cumsum(0) - part for part in counts.split(SHARD)]
    return torch.cat(starts).tolist()


@torch.no_grad()
def label(run: Run, target: CausalLM, texts: Texts, states: bool = False) -> Labels:
    """Run the target over texts, unless files have its labels already.

    With `states` its hidden states are kept too. A file is named by the texts that it is about, so
    trainings that share a folder share the labels of the texts that they have in common.
    """
    shards = [texts.take(rows) for rows in torch.arange(len(texts)).split(SHARD)]
    kind = "-states" if states else ""
    paths = [run.shared / f"labels/{shard.digest[:24]}{kind}.safetensors" for shard in shards]
    what = f"target's labels of {SHARD} texts each"
    save_missing(paths, lambda number: _labelled(target, shards[number], states), what, run.say)
    return Labels(texts, paths, target.device)


def _labelled(target: CausalLM, texts: Texts, states: bool) -> dict[str, Tensor]:
    """Return what one file holds, the rows of all texts one after the other."""
    tokens = []
    probs = []
    hidden = []
    bounds = zip(texts.begins.tolist(), texts.ends.tolist(), strict=True)
    for text, (begin, end) in zip(texts.tokens.tolist(), bounds, strict=True):
        distributions = _distributions(target, text[:end])
        tokens.append(distributions.tokens[begin:].cpu())
        probs.append(distributions.probs[begin:].cpu())
        if states:
            assert target.prompt_hidden is not None
            hidden.append(target.prompt_hidden.bfloat16().cpu())
    target.forget_prompt()
    labels = {
        "tokens": torch.cat(tokens).to(torch.int32),
        "probs": torch.cat(probs).to(torch.bfloat16),
    }
    if states:
        labels["states"] = torch.cat(hidden)
    return labels


def _distributions(target: CausalLM, tokens: list[int]) -> TopProbs:
    """Return the target's distributions at all positions of a text."""
    chunks: list[TopProbs] = []

    def keep(logits: Tensor) -> None:
        chunks.append(top_probs(logits))

    for _ in target.prefill(tokens, LOGIT_ROWS, capture="head", on_logits=keep):
        pass
    return TopProbs(
        torch.cat([chunk.tokens for chunk in chunks]), torch.cat([chunk.probs for chunk in chunks])
    )


def texts_per_forward(texts: Texts, target: CausalLM) -> int:
    """Return how many texts one forward takes."""
    return max(1, min(8, LOGITS // (texts.tokens.shape[1] * target.vocab_size)))


def in_parts(states: Tensor, loss: Callable[[Tensor, slice], Tensor], share: float) -> Tensor:
    """Return the sum of `loss(states[part], part)` over parts of states [n, d], divided by `share`.

    The logits of all n states never exist at once: each part goes backward by itself, inside this
    function, and adds to the gradients of the other inputs of `loss`. So call backward exactly once
    on the result, unscaled.
    """
    parts = [slice(start, start + LOGIT_ROWS) for start in range(0, len(states), LOGIT_ROWS)]
    if not (torch.is_grad_enabled() and states.requires_grad):
        losses = [loss(states[part], part) / share for part in parts]
        return torch.stack([states.new_zeros(()), *losses]).sum()
    total = states.new_zeros(())
    gradients = []
    for part in parts:
        leaf = states[part].detach().requires_grad_()
        part_loss = loss(leaf, part) / share
        part_loss.backward()
        total = total + part_loss.detach()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    if not gradients:
        return total + 0 * states.sum()
    # A term of value 0, whose gradient by the states is the one that was computed above.
    carrier = (states * torch.cat(gradients)).sum()
    return total + carrier - carrier.detach()
