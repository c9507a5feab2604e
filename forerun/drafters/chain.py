"""Drafting with a smaller model, one token a forward (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional

from forerun.decode import Generation, Proposal
from forerun.draft import Draft
from forerun.lengths import LengthPolicy, Look
from forerun.model import CausalLM
from forerun.sampling import Verdict, choose


class ChainDrafter:
    """A draft model's own continuation of each sequence, as long as the length policy says.

    The draft's logits go through the sequence's own processors, and the laws that result are what its tokens are
    drawn from and what the acceptance rule is given.

    Embeddings may be padded to another size than the target's `vocab_size` (default: to the same). Ids that the draft
    lacks are never drawn from its logits, and behind one that the target said nothing more is drafted.
    """

    def __init__(self, model: CausalLM, policy: LengthPolicy, vocab_size: int | None = None) -> None:
        self.model, self.policy = model, policy
        self.wants_hidden = policy.wants_target
        model.keeps_hidden = policy.wants_draft
        self.vocab_size = vocab_size or model.vocab_size

    def start(self, seqs: Sequence[Generation], hidden: Tensor | None = None) -> None:
        self._run_prompts(seqs)
        self.policy.start(seqs)

    def _run_prompts(self, seqs: Sequence[Generation]) -> None:
        # Behind a prompt that the draft cannot read, or that fills its context, nothing will ever be drafted.
        context = self.model.context
        fits = [(not context or len(seq.tokens) <= context) and self._knows(seq.tokens) for seq in seqs]
        self.model.start([seq.tokens[:-1] if fit else [] for seq, fit in zip(seqs, fits, strict=True)])

    def _knows(self, tokens: Sequence[int]) -> bool:
        return self.model.vocab_size >= self.vocab_size or max(tokens) < self.model.vocab_size

    def _depths(self, seqs: Sequence[Generation]) -> list[int]:
        """How many tokens may be drafted for each."""
        context, lengths = self.model.context, self.model.cache.lengths
        depths = [min(seq.room - 1, context - len(seq.tokens) + 1 if context else seq.room) for seq in seqs]
        known = [self._knows(seq.tokens[at:]) for seq, at in zip(seqs, lengths, strict=True)]
        return [depth if on else 0 for depth, on in zip(depths, known, strict=True)]

    def propose(self, seqs: Sequence[Generation]) -> Proposal:
        depth = self._depths(seqs)
        tokens: list[list[int]] = [[] for _ in seqs]
        laws: list[list[Tensor]] = [[] for _ in seqs]
        going = [d > 0 for d in depth]
        forwards, forward_seconds, policy_seconds = 0, 0.0, 0.0
        # Whose tokens need not be looked at before the next one is drafted.
        likeliest = all(seq.sampler.likeliest for seq in seqs)
        while any(going):
            # The first forward catches up with what the target committed, the others run the last draft token.
            pending = [
                (seq.tokens + drafted)[length:] if on else []
                for seq, drafted, length, on in zip(seqs, tokens, self.model.cache.lengths, going, strict=True)
            ]
            rows = [row for row, on in enumerate(going) if on]
            begun = perf_counter()
            done = len(tokens[rows[0]])
            ahead = min(self.policy.certain(rows, done), *(depth[row] - done for row in rows)) if likeliest else 1
            best, logits, hidden = self.model.roll(pending, ahead, self.vocab_size)
            forward_seconds += perf_counter() - begun
            known = best.T.tolist() if likeliest else []
            forwards += ahead
            for turn in range(ahead):
                rows = [row for row in rows if going[row]]
                if not rows:
                    break
                own = slice(None) if len(rows) == len(seqs) else rows
                fitted, law = self._fitted(logits[turn][own]), None
                if known:
                    chosen, scores = [known[turn][row] for row in rows], fitted.float()
                else:
                    chosen, scores, law = choose(
                        [seqs[row].sampler for row in rows],
                        fitted,
                        lambda i, rows=rows: seqs[rows[i]].tokens + tokens[rows[i]],  # type: ignore[misc]
                        [seqs[row].generator for row in rows],
                    )
                for i, (row, token) in enumerate(zip(rows, chosen, strict=True)):
                    tokens[row].append(token)
                    if law is not None and not seqs[row].sampler.greedy:
                        laws[row].append(law[i])
                    # Behind an end token nothing can be committed; a processor may have forced a token that is unknown.
                    going[row] = len(tokens[row]) < depth[row] and token not in seqs[row].eos and self._knows([token])
                asked = perf_counter()
                states = hidden[turn][own] if hidden else None
                more = self.policy.more(Look(rows, [tokens[row] for row in rows], scores, states))
                for row, on in zip(rows, more, strict=True):
                    going[row] = going[row] and on
                policy_seconds += perf_counter() - asked
        drafts = [
            Draft.chain(seq.tokens[-1], drafted, torch.stack(law) if law else None)
            for seq, drafted, law in zip(seqs, tokens, laws, strict=True)
        ]
        return Proposal(drafts, forwards, forward_seconds, policy_seconds)

    def observe(
        self, seqs: Sequence[Generation], drafts: list[Draft], verdicts: list[Verdict], hidden: Tensor | None
    ) -> None:
        self.policy.observe(drafts, verdicts, hidden)
        self._crop(seqs)

    def _crop(self, seqs: Sequence[Generation]) -> None:
        # What was run of the accepted path stays; the rest of the draft goes.
        self.model.crop(
            [min(length, len(seq.tokens) - 1) for length, seq in zip(self.model.cache.lengths, seqs, strict=True)]
        )

    def keep(self, rows: list[int]) -> None:
        self.model.keep(rows)
        self.policy.keep(rows)

    def _fitted(self, logits: Tensor) -> Tensor:
        """Logits [R, V] of the target's vocabulary from those of the draft's."""
        missing = self.vocab_size - logits.shape[-1]
        # A negative number cuts.
        return functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
