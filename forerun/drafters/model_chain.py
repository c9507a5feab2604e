"""Drafting with a smaller model, one token a forward (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, prod
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.engine.draft import Draft
from forerun.engine.step import Proposal
from forerun.planning.forecast import PlannedDrafter
from forerun.planning.length import ChainPlanner
from forerun.planning.stop_rules import Bounds, DraftState, LengthPolicy, StopRule
from forerun.sampling import probabilities, seeded
from forerun.sampling import sampler as sampling
from forerun.sampling.threads import one_thread

if TYPE_CHECKING:
    from forerun.engine.sequence import Sequence
    from forerun.engine.step import RowOutcome
    from forerun.model.causal_lm import CausalLM
    from forerun.planning.cost_model import Costs
    from forerun.sampling.sampler import Drafted


@dataclass
class Chain:
    """A chain in the making: at most `depth` tokens, and the distributions `q` that they were sampled from. If it
    `drops` the last one, that is no part of the draft."""

    seq: Sequence
    depth: int
    tokens: list[int] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    drops: bool = False

    @property
    def needs_q(self) -> bool:
        """Return whether the acceptance rule needs `q`."""
        return not self.seq.greedy and self.seq.seeded is None

    def add(self, token: int, q: Tensor | None) -> None:
        """Append a token that was sampled from `q` [V], or the argmax without `q`."""
        self.tokens.append(token)
        if q is not None and self.needs_q:
            self.q.append(q)

    def pending(self, length: int) -> list[int]:
        """Return the tokens after the first `length`, which a model has run."""
        return [*self.seq.tokens[length:], *self.tokens[max(0, length - len(self.seq.tokens)) :]]

    def text(self) -> list[int]:
        return self.seq.tokens + self.tokens

    def draft(self, origin: str = "draft") -> Draft:
        q = None
        if self.q:
            with one_thread(len(self.q) * len(self.q[0])):
                q = torch.stack(self.q)
        return Draft.chain(
            self.seq.tokens[-1], self.tokens[:-1] if self.drops else self.tokens, q, origin
        )


class ChainDrafter(PlannedDrafter):
    """Draft a chain for each sequence with a draft model, ended by a length policy.

    The draft's logits go through the sequence's own processors. Tokens are sampled from the resulting distributions q,
    which the acceptance rule uses too.

    The draft's embeddings may be padded to another size than the target's `vocab_size` (default: the same). Ids that
    the draft lacks are never drafted. After such a token of the target nothing more is drafted.
    """

    def __init__(
        self,
        model: CausalLM,
        policy: LengthPolicy,
        vocab_size: int | None = None,
        costs: Costs | None = None,
    ) -> None:
        """Take over a draft model. `costs`, if they are known, tell where drafts cannot pay."""
        self.planner = ChainPlanner(costs) if costs is not None else None
        self.model, self.policy = model, policy
        self.vocab_size = vocab_size or model.vocab_size
        self.spread = 0
        self.slack = 0  # positions that a draft forward may need beyond a sequence's limit
        self._present: set[int] = set()
        self._open: set[int] = set()  # sequences whose rows hold drafted tokens

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        self._present.add(seq.id)
        self.policy.admit(seq)
        context, tokens = self.model.context, self._text(seq)
        # After a prompt that the draft cannot read, or that fills its context, nothing is ever drafted.
        if (not context or len(tokens) <= context) and self._knows(tokens):
            yield from self.model.prefill(tokens[:-1], chunk, salt=seq.request.salt)
            self.model.join(seq.id, min(seq.limit, context or seq.limit) + self.slack)

    def drop(self, seq: Sequence) -> None:
        if (
            seq.finish_reason in ("stop", "length", "abort")
            and seq.id in self.model
            and seq.id not in self._open
        ):
            self.model.park(seq.id, self._text(seq), salt=seq.request.salt)
        self.model.drop(seq.id)
        self.policy.drop(seq)
        self._open.discard(seq.id)
        self._present.discard(seq.id)
        if not self._present:
            self.model.forget_prompt()

    # Overridden by `forerun.drafters.translated`:

    def _text(self, seq: Sequence) -> list[int]:
        return seq.tokens

    def _pending(self, chain: Chain) -> list[int]:
        return chain.pending(self.model.length(chain.seq.id))

    def _logits(self, ids: abc.Sequence[int], pending: abc.Sequence[abc.Sequence[int]]) -> Tensor:
        """Run tokens of each sequence; return the logits [R, V] after them, in the target's vocabulary."""
        return self._fitted(torch.stack([own[-1] for own in self.model.extend(ids, pending)]))

    def _at_once(self, chain: Chain, rule: StopRule) -> float | None:
        """Draft a whole chain in fused calls, each as far as the rule's bounds reach, and return the seconds of the
        rule. Return None, with nothing done, if that is not possible (`FusedDraft`)."""
        bounds, seconds, product = rule.bounds(), 0.0, 1.0
        if (
            bounds is None
            or self.model.fused_draft is None
            or self.model.vocab_size > self.vocab_size
        ):
            return None  # it may draft padding
        while bounds is not None:
            found = self._stretch(chain, bounds)
            if found is None:
                assert not chain.tokens
                return None
            asked, is_whole, bounds = perf_counter(), len(found.tokens) == bounds.max_tokens, None
            if is_whole and self._goes_on(chain):
                bounds = rule.bounds_after(chain.seq, chain.tokens, found.probabilities)
            seconds, product = seconds + perf_counter() - asked, product * prod(found.probabilities)
        chain.drops = chain.seq.greedy and rule.drops(chain.seq, product)
        return seconds

    def _stretch(self, chain: Chain, bounds: Bounds) -> Drafted | None:
        """Draft within bounds in one fused call, or return None."""
        most, seq, how = min(bounds.max_tokens, chain.depth - len(chain.tokens)), chain.seq, None
        source = seq.generator if chain.needs_q else None
        before = source.get_state() if source is not None else None
        if not seq.sampler.is_argmax:
            if seq.sampler.distribution is None:
                return None
            numbers = uniforms(source, most) if source is not None else None
            places = range(len(chain.tokens), len(chain.tokens) + most)
            keys = [
                each.key
                for each in map(seq.source, places)
                if isinstance(each, seeded.SeededSampler)
            ]
            how = sampling.ChainSampling(seq.sampler.distribution, numbers, keys, self.vocab_size)
        pending, cache, draft = self._pending(chain), self.model.cache, self.model.fused_draft
        assert draft is not None
        limits = bounds.min_probability, bounds.min_product
        found = draft(cache, seq.id, pending, most, *limits, seq.eos, how)
        if source is not None and before is not None and len(found.tokens) < most:
            source.set_state(before)  # unused random numbers come again
            uniforms(source, len(found.tokens))
        chain.tokens += found.tokens
        if found.probs is not None:
            chain.q += self._fitted(found.probs, 0.0)
        return found

    def _knows(self, tokens: abc.Sequence[int]) -> bool:
        return self.model.vocab_size >= self.vocab_size or max(tokens) < self.model.vocab_size

    def _depth(self, seq: Sequence) -> int:
        if seq.id not in self.model or not self._knows(seq.tokens[self.model.length(seq.id) :]):
            return 0
        context = self.model.context
        return min(seq.remaining - 1, context - len(seq.tokens) + 1 if context else seq.remaining)

    def propose(self, seqs: list[Sequence]) -> Proposal:
        chains = [Chain(seq, self._depth(seq)) for seq in seqs]
        return self._grow(chains, len(seqs))

    def _grow(self, chains: list[Chain], rows: int) -> Proposal:
        """Draft for all chains together, one forward a token. `rows`: number of rows of the target's forward."""
        going = [chain for chain in chains if chain.depth > 0]
        rule = self.policy.begin([chain.seq for chain in going], rows) if going else None
        self._open.update(chain.seq.id for chain in going)
        forwards, forward_seconds, policy_seconds = 0, 0.0, 0.0
        if rule is not None and len(going) == 1:
            begun = perf_counter()
            asked = self._at_once(going[0], rule)
            if asked is not None:
                seconds = perf_counter() - begun - asked
                return Proposal(
                    [chain.draft() for chain in chains], len(going[0].tokens), seconds, asked
                )
        while going:
            assert rule is not None
            # The first forward also runs newly committed tokens; later ones run the last drafted token.
            ids, pending = (
                [chain.seq.id for chain in going],
                [self._pending(chain) for chain in going],
            )
            begun = perf_counter()
            logits = self._logits(ids, pending)
            forward_seconds += perf_counter() - begun
            forwards += 1
            going, seconds = self._extend(going, logits, rule)
            policy_seconds += seconds
        return Proposal(
            [chain.draft() for chain in chains], forwards, forward_seconds, policy_seconds
        )

    def _extend(
        self, chains: list[Chain], logits: Tensor, rule: StopRule
    ) -> tuple[list[Chain], float]:
        """Draft a token for each chain, from logits [R, V]. Return the chains that go on, and the seconds of the
        rule."""
        q: Tensor | None = None
        if all(chain.seq.sampler.is_argmax for chain in chains):
            tokens, scores = probabilities.argmax_of(logits).tolist(), logits.float()
        else:
            chains, tokens, scores, q = self._choose(chains, logits)
            if not chains:
                return [], 0.0
        for row, (chain, token) in enumerate(zip(chains, tokens, strict=True)):
            chain.add(token, None if q is None else q[row])
        asked = perf_counter()
        more = rule.more(
            DraftState([chain.seq for chain in chains], [chain.tokens for chain in chains], scores)
        )
        for chain in chains:
            chain.drops = chain.seq.greedy and rule.drops(chain.seq)
        seconds = perf_counter() - asked
        return [
            chain for chain, on in zip(chains, more, strict=True) if on and self._goes_on(chain)
        ], seconds

    def _choose(
        self, chains: list[Chain], logits: Tensor
    ) -> tuple[list[Chain], list[int], Tensor, Tensor | None]:
        """Return chains and their `next_tokens`, without those whose processors raise or leave no token that this model
        has. If they raise, they will for the target too."""
        while chains:
            try:
                return chains, *sampling.next_tokens(
                    [chain.seq.sampler for chain in chains],
                    logits,
                    lambda row, now=chains: now[row].text(),  # type: ignore[misc]
                    [chain.seq.source(len(chain.tokens)) for chain in chains],
                )
            except sampling.RowError as error:
                chains = [*chains[: error.row], *chains[error.row + 1 :]]
                logits = torch.cat([logits[: error.row], logits[error.row + 1 :]])
        return [], [], logits, None

    def _goes_on(self, chain: Chain) -> bool:
        # Nothing is committed after an end token; a processor may have forced a token that the draft lacks.
        token = chain.tokens[-1]
        return (
            len(chain.tokens) < chain.depth and token not in chain.seq.eos and self._knows([token])
        )

    def observe(self, outcomes: abc.Sequence[RowOutcome], memo: Any) -> None:
        self.policy.observe(outcomes)
        self._crop([outcome.sequence for outcome in outcomes])

    def _crop(self, seqs: list[Sequence]) -> None:
        # Keep the accepted path as far as it was run.
        ids = {seq.id: len(seq.tokens) - 1 for seq in seqs if seq.id in self._open}
        if ids:
            self.model.crop(
                list(ids), [min(self.model.length(id), most) for id, most in ids.items()]
            )
        self._open.difference_update(ids)

    def _fitted(self, logits: Tensor, value: float = -inf) -> Tensor:
        """Return the draft's logits [R, V] in the target's vocabulary; missing ones are `value`."""
        missing = self.vocab_size - logits.shape[-1]  # a negative number cuts off
        return torch.nn.functional.pad(logits, (0, missing), value=value) if missing else logits


def uniforms(source: torch.Generator, count: int) -> Tensor:
    """Return the random numbers [count] with which `forerun.sampling.sampler.sample` would sample."""
    return torch.rand(count, dtype=torch.float64, generator=source)
