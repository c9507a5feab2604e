"""Drafting at the level of hidden states (Lyanna, arXiv 2602.21224): states go forward without tokens, tokens are
chosen from all of them at the end, and states behind a rejected token are used again with the right one."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from forerun.decode import Generation, Proposal
from forerun.draft import Draft
from forerun.runtime.hidden import HiddenLM
from forerun.sampling import Verdict


class LyannaDrafter:
    """Drafts `depth` states a step and makes a tree of `nodes` tokens of them, `width` beams wide; all point masses.

    Reuse of the logits that an earlier step left behind the new root: "add" gives them `weight` in the fresh ones (mode
    A of our reading of the paper); "free" drafts from them alone, without running the head, where there are `least` of
    them or more (mode D, ours); "off".
    """

    wants_hidden = True

    def __init__(
        self, head: HiddenLM, depth: int, width: int, nodes: int, reuse: str, weight: float = 0.25, least: int = 2
    ) -> None:
        self.head, self.depth, self.width, self.nodes = head, depth, width, nodes
        self.reuse, self.weight, self.least = reuse, weight, least

    def start(self, seqs: Sequence[Generation], hidden: Tensor | None = None) -> None:
        self.head.start(len(seqs))
        size = self.head.layers.width
        # Features that the head has not run yet, and logits [n, S] of an earlier draft for places behind the last
        # token.
        self.features = [
            hidden[row, : len(seq.tokens) - 1] if hidden is not None else torch.zeros(0, size, device=self.head.device)
            for row, seq in enumerate(seqs)
        ]
        self.left: list[Tensor | None] = [None] * len(seqs)
        self.said: list[Tensor | None] = [None] * len(seqs)  # logits of the present draft

    def propose(self, seqs: Sequence[Generation]) -> Proposal:
        begun, head = perf_counter(), self.head
        deep = [min(self.depth, seq.room - 1) for seq in seqs]
        free = [self.reuse == "free" and left is not None and len(left) >= self.least for left in self.left]
        logits: list[Tensor | None] = [left if is_free else None for left, is_free in zip(self.left, free, strict=True)]
        drafting = [
            row
            for row, features in enumerate(self.features)
            if not free[row] and deep[row] > 0 and len(features)  # none at the start behind a single token
        ]
        forwards = 0
        if drafting:
            fresh, forwards = self._draft(drafting, max(deep[row] for row in drafting))
            for row, own in zip(drafting, fresh, strict=True):
                left = self.left[row]
                if self.reuse == "add" and left is not None:
                    own[: len(left)] += self.weight * left[: len(own)]
                logits[row] = own
        seconds = perf_counter() - begun
        self.said = logits
        drafts = [
            grow(seq.tokens[-1], own[:limit], head, self.width, self.nodes, "reused" if is_free else "draft")
            if own is not None and limit > 0
            else Draft.root(seq.tokens[-1])
            for seq, own, limit, is_free in zip(seqs, logits, deep, free, strict=True)
        ]
        return Proposal(drafts, forwards, seconds)

    def _draft(self, rows: list[int], steps: int) -> tuple[Tensor, int]:
        """Logits [R, K, S] of `steps` states for these rows, and the number of forwards."""
        head = self.head
        nothing = self.features[0][:0]
        features = [own if row in rows else nothing for row, own in enumerate(self.features)]
        state = head.extend(features)
        for row in rows:
            self.features[row] = nothing
        lengths, states = list(head.cache.lengths), [state]
        for _ in range(steps - 1):
            state = head.extend([own[None] if row in rows else nothing for row, own in enumerate(state)])
            states.append(state)
        head.crop(lengths)
        chosen = torch.stack(states, 1)[rows]  # [R, K, d]
        return head.logits(chosen.flatten(0, 1)).view(len(rows), steps, -1), steps

    def observe(
        self, seqs: Sequence[Generation], drafts: list[Draft], verdicts: list[Verdict], hidden: Tensor | None
    ) -> None:
        assert hidden is not None
        for row, (seq, verdict) in enumerate(zip(seqs, verdicts, strict=True)):
            self.features[row] = torch.cat([self.features[row], hidden[row, verdict.path]])
            own = self.said[row] if self.said[row] is not None else self.left[row]  # a step without a draft
            rest = own[verdict.accepted + 1 :] if own is not None else None
            self.left[row] = rest if rest is not None and len(rest) and seq.finish_reason is None else None
        self.said = [None] * len(seqs)

    def keep(self, rows: list[int]) -> None:
        self.head.keep(rows)
        self.features = [self.features[row] for row in rows]
        self.left = [self.left[row] for row in rows]
        self.said = [self.said[row] for row in rows]


def grow(root: int, logits: Tensor, head: HiddenLM, width: int, nodes: int, origin: str) -> Draft:
    """The tree of the `nodes` most probable paths that `width` beams find in logits [K, S], the law behind each token
    being given by the token information; for one beam the chain of K tokens."""
    table, hot = head.table, head.hot
    if width == 1:
        chain: list[int] = []
        for row in logits:
            chain.append(hot[int((row + table[chain[-1] if chain else root]).argmax())])
        return Draft.chain(root, chain, origin=origin)
    tokens, parents, values = [root], [-1], [0.0]
    beams = [0]
    for row in logits:
        scores = (row + table[[tokens[node] for node in beams]]).log_softmax(-1)  # [w, S]
        total = scores + torch.tensor([values[node] for node in beams], device=row.device)[:, None]
        best, at = total.flatten().topk(min(nodes, total.numel()))
        first = len(tokens)
        for value, place in zip(best.tolist(), at.tolist(), strict=True):
            tokens.append(hot[place % len(row)])
            parents.append(beams[place // len(row)])
            values.append(value)
        beams = list(range(first, min(len(tokens), first + width)))
    # A child is never more probable than its parent and comes behind it, so the best nodes hold their ancestors.
    kept = sorted(sorted(range(1, len(tokens)), key=lambda node: (-values[node], node))[:nodes])
    place = {0: 0} | {node: at for at, node in enumerate(kept, 1)}
    chosen = [root, *(tokens[node] for node in kept)]
    return Draft(chosen, [-1, *(place[parents[node]] for node in kept)], None, [origin] * len(chosen))
