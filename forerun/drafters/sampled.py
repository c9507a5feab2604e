"""Chains of tokens that are sampled from a head's logits, for sequences that are sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.draft import Draft
from forerun.drafters.beams import Logits
from forerun.generation import Generation
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
    chains: list[list[int]] = [[] for _ in seqs]
    laws: list[list[Tensor]] = [[] for _ in seqs]
    tokens = torch.tensor([seq.tokens[-1] for seq in seqs], device=hot.device)
    beams = torch.zeros_like(tokens)[:, None]
    live = list(range(len(seqs)))
    for k in range(max(limits)):
        live = [row for row in live if k < limits[row]]
        if not live:
            break
        found = logits(k, tokens[:, None], beams)[live, 0].float()
        samplers = [seqs[row].sampler for row in live]
        within = all(sampler.index_free for sampler in samplers)
        if not within:
            found = found.new_full((len(live), vocab_size), -torch.inf).index_copy_(1, hot, found)
        while live:
            try:
                chosen, _, law = next_tokens(
                    samplers,
                    found,
                    lambda i, live=live: seqs[live[i]].tokens + chains[live[i]],  # type: ignore[misc]
                    [seqs[row].source(k) for row in live],
                )
                break
            except RowError as error:
                gone = error.row
                live, samplers = live[:gone] + live[gone + 1 :], samplers[:gone] + samplers[gone + 1 :]
                found = torch.cat([found[:gone], found[gone + 1 :]])
        for i, row in enumerate(live):
            token = int(hot[chosen[i]]) if within else chosen[i]
            chains[row].append(token)
            tokens[row] = token
            if law is not None and not seqs[row].greedy and seqs[row].races is None:
                own = law[i]
                laws[row].append(own.new_zeros(vocab_size).index_copy_(0, hot, own) if within else own)
    return [
        Draft.chain(seq.tokens[-1], chain, torch.stack(own) if own else None, origin, block)
        for seq, chain, own, origin in zip(seqs, chains, laws, origins, strict=True)
    ]
