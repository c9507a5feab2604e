"""The frozen target's distributions over texts to train on: computed once, kept in files, the same for all recipes."""

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

TOP = 64  # tokens of a distribution; the rest of the vocabulary has next to nothing
SHARD = 64  # texts of a file
LOGITS = 1 << 26  # of a forward, at most
ROWS = 128  # whose logits stay in a processor's cache while they are used


class TopProbs(NamedTuple):
    """Distributions at n positions."""

    tokens: Tensor  # [n, k] the most probable first
    probs: Tensor  # [n, k] float32, which sum to nearly 1

    def at(self, positions: Tensor | slice) -> TopProbs:
        return TopProbs(self.tokens[positions], self.probs[positions])

    def within(self, hot: Tensor, vocabulary: int) -> TopProbs:
        """Return the same with a token's number among `hot` [S] in its place; other tokens have the probability 0."""
        number = torch.full((vocabulary,), -1, device=hot.device)
        number[hot] = torch.arange(len(hot), device=hot.device)
        found = number[self.tokens]
        return TopProbs(found.clamp(min=0), self.probs * (found >= 0))


def top_probs(logits: Tensor) -> TopProbs:
    """Return the distributions of logits [n, V]."""
    best, tokens = logits.float().topk(min(TOP, logits.shape[-1]))
    return TopProbs(tokens, (best - logits.float().logsumexp(-1, keepdim=True)).exp())


def cross_entropy(logits: Tensor, wanted: TopProbs) -> Tensor:
    """Return the sum over logits [n, S] of the cross-entropy with distributions over the same tokens."""
    return -(wanted.probs * logits.log_softmax(-1).gather(-1, wanted.tokens)).sum()


class Labels:
    """The target's labels of texts, read from files on demand."""

    def __init__(self, texts: Texts, paths: list[Path], device: torch.device) -> None:
        self._files = [safe_open(path, "pt").__enter__() for path in paths]
        self.texts, self._device = texts.to(device), device
        counts = texts.ends - texts.begins
        # Where each text begins in its file.
        starts = [
            [each.cumsum(0) - each for each in part.split(SHARD)] for part in (texts.ends, counts)
        ]
        self._states, self._probs = (torch.cat(each).tolist() for each in starts)
        self._ends, self._counts = texts.ends.tolist(), counts.tolist()

    def _read(self, name: str, row: int, start: int, length: int) -> Tensor:
        found: Tensor = self._files[row // SHARD].get_slice(name)[start : start + length]
        return found

    def states(self, rows: Tensor) -> Tensor:
        """Return the LM head's inputs [B, T, d] over texts [B], no wider than the longest of them."""
        parts = [
            self._read("states", row, self._states[row], self._ends[row]) for row in rows.tolist()
        ]
        return pad_sequence(parts, batch_first=True).to(self._device).float()

    def probs(self, rows: Tensor) -> TopProbs:
        """Return the distributions at the positions of texts [B] that count, text by text."""
        found = [
            torch.cat(
                [
                    self._read(name, row, self._probs[row], self._counts[row])
                    for row in rows.tolist()
                ]
            )
            for name in ("tokens", "probs")
        ]
        return TopProbs(found[0].to(self._device).long(), found[1].to(self._device).float())


@torch.no_grad()
def label(run: Run, target: CausalLM, texts: Texts, states: bool = False) -> Labels:
    """Run the target over texts, once; keep its states too if asked.

    A file is named by the texts that it is about, so trainings that share a folder share what they have in common.
    """
    shards = [texts.take(rows) for rows in torch.arange(len(texts)).split(SHARD)]
    kind = "-states" if states else ""
    paths = [run.shared / f"labels/{shard.digest[:24]}{kind}.safetensors" for shard in shards]
    what = f"target's labels of {SHARD} texts each"
    save_missing(paths, lambda number: _labelled(target, shards[number], states), what, run.say)
    return Labels(texts, paths, target.device)


def _labelled(target: CausalLM, texts: Texts, states: bool) -> dict[str, Tensor]:
    found: dict[str, list[Tensor]] = {"tokens": [], "probs": []}
    best: list[TopProbs] = []
    for tokens, begin, end in zip(
        texts.tokens.tolist(), texts.begins.tolist(), texts.ends.tolist(), strict=True
    ):
        best.clear()
        list(
            target.prefill(
                tokens[:end], ROWS, "", "head", lambda logits: best.append(top_probs(logits))
            )
        )
        for name, parts in zip(found, zip(*best, strict=True), strict=False):
            found[name].append(torch.cat(parts)[begin:].cpu())
        if states:
            assert target.prompt_hidden is not None
            found.setdefault("states", []).append(target.prompt_hidden.bfloat16().cpu())
    target.forget_prompt()
    types = {"tokens": torch.int32, "probs": torch.bfloat16, "states": torch.bfloat16}
    return {name: torch.cat(each).to(types[name]) for name, each in found.items()}


def together(texts: Texts, target: CausalLM) -> int:
    """Return how many texts a forward takes at once."""
    return max(1, min(8, LOGITS // (texts.tokens.shape[1] * target.vocab_size)))


def in_parts(states: Tensor, loss: Callable[[Tensor, slice], Tensor], share: float) -> Tensor:
    """Return the sum of `loss(states[part], part)` over parts of states [n, d], divided by `share`.

    Logits of all n never exist at once: each part goes backward by itself, and adds to the gradients of other inputs
    of `loss`. So call backward just once on the result, unscaled.
    """
    parts = [slice(start, start + ROWS) for start in range(0, len(states), ROWS)]
    if not (torch.is_grad_enabled() and states.requires_grad):
        return torch.stack(
            [states.new_zeros(()), *(loss(states[part], part) / share for part in parts)]
        ).sum()
    total, gradients = states.new_zeros(()), []
    for part in parts:
        leaf = states[part].detach().requires_grad_()
        found = loss(leaf, part) / share
        found.backward()
        total = total + found.detach()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    if not gradients:
        return total + 0 * states.sum()
    # Its gradient by the states is the one that was found.
    way = (states * torch.cat(gradients)).sum()
    return total + way - way.detach()
