"""Chains of tokens that are sampled from a head's logits, for sequences that are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun.draft import Draft
from forerun.drafters.beams import Logits
from forerun.generation import Generation
from forerun.races import Race
from forerun.sampling import RowError, next_tokens


@torch.inference_mode()
def sample_chains(
    seqs: Sequence[Generation],
    logits: Logits,
    hot: Tensor,
    vocab_size: int,
    limits: Sequence[int],
    origins: Sequence[str],
    block: bool,
) -> list[Draft]:
    """A chain for each sequence, at most `limits[r]` long. Its tokens are drawn by the sequence's own sampler.

    `logits` and `hot` are those of `beams.grow`, `block` is that of Draft. A chain ends where processors leave none of
    the hot tokens. Where they raise, they will do so for the target's logits too.
    """

    def text(row: int) -> list[int]:
        return seqs[row].tokens + chains[row]

    chains: list[list[int]] = [[] for _ in seqs]
    laws: list[list[Tensor]] = [[] for _ in seqs]
    tokens = torch.tensor([seq.tokens[-1] for seq in seqs], device=hot.device)
    beams, names = torch.zeros_like(tokens)[:, None], hot.cpu().numpy()
    live = list(range(len(seqs)))
    for k in range(max(limits)):
        live = [row for row in live if k < limits[row]]
        if not live:
            break
        found = logits(k, tokens[:, None], beams)[:, 0].float()
        for row in list(live):
            # One by one: which part of the vocabulary a row's processors see is not for its neighbours to decide.
            seq, scores, source = seqs[row], found[row : row + 1], seqs[row].source(k)
            within = seq.sampler.index_free
            if not within:
                scores = scores.new_full((1, vocab_size), -torch.inf).index_copy_(1, hot, scores)
            elif isinstance(source, Race):
                source = replace(source, names=names, size=vocab_size)
            try:
                (chosen,), _, law = next_tokens([seq.sampler], scores, lambda _, row=row: text(row), [source])  # type: ignore[misc]
            except RowError:
                live.remove(row)
                continue
            tokens[row] = token = int(hot[chosen]) if within else chosen
            chains[row].append(token)
            if law is not None and seq.races is None:
                whole = law[0]
                laws[row].append(whole.new_zeros(vocab_size).index_copy_(0, hot, whole) if within else whole)
    return [
        Draft.chain(seq.tokens[-1], chain, torch.stack(own) if own else None, origin, block)
        for seq, chain, own, origin in zip(seqs, chains, laws, origins, strict=True)
    ]
