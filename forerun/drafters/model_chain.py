"""Drafting with a smaller model, one token per forward (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from forerun.engine.draft import Draft
from forerun.engine.step import Proposal
from forerun.planning.forecast import PlannedDrafter
from forerun.planning.length import ChainPlanner
from forerun.planning.stop_rules import Bounds, DraftState, LengthPolicy, StopRule
from forerun.sampling.probabilities import argmax_of
from forerun.sampling.sampler import ChainSampling, RowError, next_tokens
from forerun.sampling.seeded import SeededSampler
from forerun.sampling.threads import one_thread

if TYPE_CHECKING:
    from forerun.engine.sequence import Sequence
    from forerun.engine.step import RowOutcome
    from forerun.engine.target import ChunkSize
    from forerun.model.causal_lm import CausalLM
    from forerun.planning.cost_model import CostSource
    from forerun.sampling.sampler import Drafted

FARTHEST_BEHIND = 512  # tokens that a draft may run before its own, which takes 0.05 seconds


@dataclass
class Chain:
    """A chain that is being drafted.

    Attributes:
        seq: the sequence that it is drafted for.
        depth: the most tokens of the chain; 0 or less if nothing can be drafted for the sequence.
        tokens: the drafted tokens so far.
        q: the distributions [V] that they were sampled from, if the acceptance rule needs them.
        drops: whether the draft leaves out the last token, so that a chain of one is empty.
    """

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
        """Return the sequence's tokens and those of the chain."""
        return self.seq.tokens + self.tokens

    def draft(self, origin: str = "draft") -> Draft:
        """Return the chain as a draft."""
        q = None
        if self.q:
            with one_thread(len(self.q) * len(self.q[0])):
                q = torch.stack(self.q)
        tokens = self.tokens[:-1] if self.drops else self.tokens
        return Draft.chain(self.seq.tokens[-1], tokens, q, origin)


class Chosen(NamedTuple):
    """The next tokens of chains.

    Attributes:
        scores: [R, V] the processed scores.
        q: [R, V] the distributions that the tokens were sampled from; None if all are greedy.
    """

    chains: list[Chain]
    tokens: list[int]
    scores: Tensor
    q: Tensor | None


class ChainDrafter(PlannedDrafter):
    """Draft a chain for each sequence with a draft model, ended by a length policy.

    The draft's logits go through the sequence's own processors. Tokens are sampled from the
    resulting distributions q, which the acceptance rule uses too.

    The draft's embeddings may be padded to another size than the target's `vocab_size` (default:
    the same). Ids that the draft lacks are never drafted. After such a token of the target nothing
    more is drafted.
    """

    def __init__(
        self,
        model: CausalLM,
        policy: LengthPolicy,
        vocab_size: int | None = None,
        costs: CostSource | None = None,
    ) -> None:
        """Take over a draft model. `costs`, if they are known, tell where drafts cannot pay."""
        self.planner = ChainPlanner(costs) if costs is not None else None
        self.model = model
        self.policy = policy
        self.vocab_size = vocab_size or model.vocab_size
        self.extra_nodes = 0
        self.extra_positions = (
            0  # positions that a draft forward may need beyond a sequence's limit
        )
        self._present: set[int] = set()  # the sequences that were admitted
        # Sequences whose rows hold drafted tokens. A failed step leaves some here until they are
        # dropped, so this is no part of a proposal's memo.
        self._open: set[int] = set()

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: ChunkSize) -> Iterator[int]:
        """Run a prompt, if the draft model can read it and it does not fill its context.

        Otherwise nothing is ever drafted for the sequence.
        """
        self._present.add(seq.id)
        self.policy.admit(seq)
        context = self.model.context
        tokens = self._text(seq)
        if (not context or len(tokens) <= context) and self._knows(tokens):
            yield from self.model.prefill(tokens[:-1], chunk, cache_salt=seq.request.cache_salt)
            self.model.join(seq.id, min(seq.limit, context or seq.limit) + self.extra_positions)

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence. The draft model keeps the prefix of one that has ended well."""
        is_ended = seq.finish_reason in ("stop", "length", "abort")
        if is_ended and seq.id in self.model and seq.id not in self._open:
            self.model.save_prefix(seq.id, self._text(seq), cache_salt=seq.request.cache_salt)
        self.model.drop(seq.id)
        self.policy.drop(seq)
        self._open.discard(seq.id)
        self._present.discard(seq.id)
        if not self._present:
            self.model.forget_prompt()

    def propose(self, seqs: list[Sequence]) -> Proposal:
        """Return a chain for each sequence."""
        chains = [Chain(seq, self._depth(seq)) for seq in seqs]
        return self._grow(chains, len(seqs))

    def observe(self, outcomes: abc.Sequence[RowOutcome], memo: Any) -> None:
        """Keep of the model's rows what was accepted, and tell the length policy."""
        self.policy.observe(outcomes)
        self._crop([outcome.sequence for outcome in outcomes])

    # Overridden by `forerun.drafters.translated`:

    def _text(self, seq: Sequence) -> list[int]:
        """Return the model's tokens of a sequence's text."""
        return seq.tokens

    def _knows(self, tokens: abc.Sequence[int]) -> bool:
        """Return whether the model has all of these tokens. There is at least one."""
        return self.model.vocab_size >= self.vocab_size or max(tokens) < self.model.vocab_size

    def _depth(self, seq: Sequence) -> int:
        """Return the most tokens that may be drafted for a sequence.

        None may be if the model has no row for it (`admit`), or lacks a token that it has to run.
        Nor may any while it is far behind, because nobody asked for long. It reads a part then: the
        whole would hold up the step, for 0.8 seconds after 7,000 tokens.
        """
        if seq.id not in self.model:
            return 0
        pending = seq.tokens[self.model.length(seq.id) :]
        if not self._knows(pending):
            return 0
        if len(pending) > FARTHEST_BEHIND:
            self.model.read(seq.id, pending[:FARTHEST_BEHIND])
            return 0
        context = self.model.context
        if not context:
            return seq.remaining - 1
        return min(seq.remaining - 1, context - len(seq.tokens) + 1)

    def _pending(self, chain: Chain) -> list[int]:
        """Return the tokens of a chain and its text that the model has not run."""
        return chain.pending(self.model.length(chain.seq.id))

    def _logits(self, ids: abc.Sequence[int], pending: abc.Sequence[abc.Sequence[int]]) -> Tensor:
        """Run tokens of each sequence, and return the logits [R, V] after them.

        The logits are in the target's vocabulary.
        """
        last = [logits[-1] for logits in self.model.extend(ids, pending)]
        return self._fitted(torch.stack(last))

    def _goes_on(self, chain: Chain) -> bool:
        """Return whether a chain may have another token.

        Nothing is committed after an end token. A processor may have forced a token that the model
        lacks.
        """
        token = chain.tokens[-1]
        is_end = token in chain.seq.eos or not self._knows([token])
        return len(chain.tokens) < chain.depth and not is_end

    def _crop(self, seqs: list[Sequence]) -> None:
        """Keep the accepted path of each sequence, as far as the model has run it."""
        ids = [seq.id for seq in seqs if seq.id in self._open]
        lengths = [
            min(self.model.length(seq.id), len(seq.tokens) - 1)
            for seq in seqs
            if seq.id in self._open
        ]
        if ids:
            self.model.crop(ids, lengths)
        self._open.difference_update(ids)

    def _at_once(self, chain: Chain, rule: StopRule) -> float | None:
        """Draft a whole chain in fused calls, and return the seconds of the rule.

        Each call drafts as far as the rule's bounds reach. Return None, with nothing done, if fused
        calls are not possible (`FusedDraft`). They are not if the model's vocabulary is the larger
        one, because they could draft padding.
        """
        bounds = rule.bounds()
        is_larger = self.model.vocab_size > self.vocab_size
        if bounds is None or self.model.fused_draft is None or is_larger:
            return None
        seconds = 0.0
        product = 1.0
        while bounds is not None:
            drafted = self._stretch(chain, bounds)
            if drafted is None:
                assert not chain.tokens
                return None
            asked_at = perf_counter()
            is_whole = len(drafted.tokens) == bounds.max_tokens
            bounds = None
            if is_whole and self._goes_on(chain):
                bounds = rule.bounds_after(chain.seq, chain.tokens, drafted.probabilities)
            seconds += perf_counter() - asked_at
            product *= prod(drafted.probabilities)
        chain.drops = chain.seq.greedy and rule.drops(chain.seq, product)
        return seconds

    def _stretch(self, chain: Chain, bounds: Bounds) -> Drafted | None:
        """Draft within bounds in one fused call, or return None."""
        seq = chain.seq
        count = min(bounds.max_tokens, chain.depth - len(chain.tokens))
        source = seq.generator if chain.needs_q else None
        state = source.get_state() if source is not None else None
        sampling = None
        if not seq.sampler.is_argmax:
            sampling = self._chain_sampling(chain, count, source)
            if sampling is None:
                return None
        draft = self.model.fused_draft
        assert draft is not None
        drafted = draft(
            self.model.cache,
            seq.id,
            self._pending(chain),
            replace(bounds, max_tokens=count),
            seq.eos,
            sampling,
        )
        if source is not None and state is not None and len(drafted.tokens) < count:
            # Unused random numbers come again.
            source.set_state(state)
            uniforms(source, len(drafted.tokens))
        chain.tokens += drafted.tokens
        if drafted.probs is not None:
            chain.q += self._fitted(drafted.probs, 0.0)
        return drafted

    def _chain_sampling(
        self, chain: Chain, count: int, source: torch.Generator | None
    ) -> ChainSampling | None:
        """Return how the next `count` tokens of a chain are sampled in a fused call, or None."""
        seq = chain.seq
        if seq.sampler.distribution is None:
            return None
        numbers = uniforms(source, count) if source is not None else None
        keys = []
        for place in range(len(chain.tokens), len(chain.tokens) + count):
            place_source = seq.source(place)
            if isinstance(place_source, SeededSampler):
                keys.append(place_source.key)
        return ChainSampling(seq.sampler.distribution, numbers, keys, self.vocab_size)

    def _grow(self, chains: list[Chain], rows: int) -> Proposal:
        """Draft for all chains. `rows`: the number of rows of the target's forward."""
        going = [chain for chain in chains if chain.depth > 0]
        if not going:
            return Proposal([chain.draft() for chain in chains])
        rule = self.policy.begin([chain.seq for chain in going], rows)
        self._open.update(chain.seq.id for chain in going)
        if len(going) == 1:
            started_at = perf_counter()
            policy_seconds = self._at_once(going[0], rule)
            if policy_seconds is not None:
                seconds = perf_counter() - started_at - policy_seconds
                drafts = [chain.draft() for chain in chains]
                count = len(going[0].tokens)
                return Proposal(drafts, count, seconds, policy_seconds, forward_rows=1)
        return self._grow_by_forwards(chains, going, rule)

    def _grow_by_forwards(
        self, chains: list[Chain], going: list[Chain], rule: StopRule
    ) -> Proposal:
        """Draft for the chains that are `going` together, one forward per token.

        The first forward also runs newly committed tokens. Later ones run the last drafted token.
        """
        first_rows = len(going)
        last_rows = first_rows
        forwards = 0
        forward_seconds = 0.0
        policy_seconds = 0.0
        while going:
            ids = [chain.seq.id for chain in going]
            pending = [self._pending(chain) for chain in going]
            last_rows = len(ids)
            started_at = perf_counter()
            logits = self._logits(ids, pending)
            forward_seconds += perf_counter() - started_at
            forwards += 1
            going, seconds = self._extend(going, logits, rule)
            policy_seconds += seconds
        drafts = [chain.draft() for chain in chains]
        # Where chains ended early, the forwards were of several sizes, and only their sum is known.
        rows = first_rows if last_rows == first_rows else 0
        return Proposal(drafts, forwards, forward_seconds, policy_seconds, forward_rows=rows)

    def _extend(
        self, chains: list[Chain], logits: Tensor, rule: StopRule
    ) -> tuple[list[Chain], float]:
        """Draft a token for each chain, from logits [R, V].

        Return the chains that go on, and the seconds of the rule.
        """
        chosen = self._choose(chains, logits)
        chains = chosen.chains
        if not chains:
            return [], 0.0
        for row, (chain, token) in enumerate(zip(chains, chosen.tokens, strict=True)):
            chain.add(token, None if chosen.q is None else chosen.q[row])
        asked_at = perf_counter()
        seqs = [chain.seq for chain in chains]
        more = rule.more(DraftState(seqs, [chain.tokens for chain in chains], chosen.scores))
        for chain in chains:
            chain.drops = chain.seq.greedy and rule.drops(chain.seq)
        seconds = perf_counter() - asked_at
        going = [
            chain
            for chain, is_wanted in zip(chains, more, strict=True)
            if is_wanted and self._goes_on(chain)
        ]
        return going, seconds

    def _choose(self, chains: list[Chain], logits: Tensor) -> Chosen:
        """Return the next tokens of chains, from logits [R, V].

        Chains are left out whose processors raise, or leave no token that this model has. If
        processors raise here, they will for the target too.
        """
        if all(chain.seq.sampler.is_argmax for chain in chains):
            return Chosen(chains, argmax_of(logits).tolist(), logits.float(), None)
        while chains:
            samplers = [chain.seq.sampler for chain in chains]
            sources = [chain.seq.source(len(chain.tokens)) for chain in chains]
            try:
                tokens, scores, q = next_tokens(
                    samplers, logits, partial(_chain_text, chains), sources
                )
            except RowError as error:
                chains = [*chains[: error.row], *chains[error.row + 1 :]]
                logits = torch.cat([logits[: error.row], logits[error.row + 1 :]])
            else:
                return Chosen(chains, tokens, scores, q)
        return Chosen([], [], logits, None)

    def _fitted(self, logits: Tensor, value: float = -inf) -> Tensor:
        """Return the draft's logits [R, V] in the target's vocabulary; missing ones are `value`."""
        missing = self.vocab_size - logits.shape[-1]  # a negative number cuts off
        return torch.nn.functional.pad(logits, (0, missing), value=value) if missing else logits


def _chain_text(chains: list[Chain], row: int) -> list[int]:
    return chains[row].text()


def uniforms(source: torch.Generator, count: int) -> Tensor:
    """Return the random numbers [count] with which `sampler.sample` would sample."""
    return torch.rand(count, dtype=torch.float64, generator=source)
