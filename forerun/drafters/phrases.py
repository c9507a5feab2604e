"""Drafting by phrases (Ouroboros, arXiv 2402.13720).

A forward of the draft model checks phrases: token strings that followed the last token earlier. The
longest one that the model would choose itself is drafted at once.

Ours: sampling, a length for each row, length policies, and phrases from the prompt. Tokens are
sampled from the draft's distributions one by one, as in a plain chain. A phrase with the same
tokens only saves forwards.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING

from forerun.drafters.model_chain import Chain, ChainDrafter
from forerun.drafters.pools import PhrasePool
from forerun.engine.draft import Draft, Tree
from forerun.engine.step import Proposal
from forerun.methods.phrases import PacerOuroboros, Phrases
from forerun.planning.cost_model import mean_context
from forerun.planning.forecast import StepSituation
from forerun.planning.source_chooser import PhraseChooser
from forerun.planning.stop_rules import DraftState, LengthPolicy, StopRule
from forerun.sampling.probabilities import argmax_of
from forerun.sampling.sampler import RowError, next_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.engine.sequence import Sequence
    from forerun.engine.step import RowOutcome
    from forerun.engine.target import ChunkSize
    from forerun.model.causal_lm import CausalLM
    from forerun.planning.cost_model import Costs


@dataclass
class _Row:
    """The state of one sequence: its pool, and the length of its text that is in the pool."""

    pool: PhrasePool
    read: int


@dataclass
class _Phrased(Chain):
    """A chain that is being drafted by phrases.

    Attributes:
        rule: ends it; None if nothing may be drafted.
        policy_seconds: of the rule.
        suffixes: phrases after the chain, and their nodes.
    """

    rule: StopRule | None = None
    policy_seconds: float = 0.0
    suffixes: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)


@dataclass(frozen=True)
class PhraseNote:
    """What is kept of a chain that was made with phrases.

    Attributes:
        count: the number of its tokens, without those of phrases after it.
        suffixes: the phrases after it, and their nodes.
    """

    count: int
    suffixes: list[tuple[tuple[int, ...], list[int]]]


@dataclass(frozen=True)
class PhraseMemo:
    """What a drafter by phrases keeps of a step until it observes it: notes by sequence."""

    notes: dict[int, PhraseNote]


class OuroborosDrafter(ChainDrafter):
    """Draft a chain with the draft model, several tokens per forward if phrases fit.

    The length policy ends the chain.
    """

    def __init__(
        self,
        settings: Phrases,
        model: CausalLM,
        policy: LengthPolicy,
        vocab_size: int | None = None,
        pool: PhrasePool | None = None,
        costs: Costs | None = None,
    ) -> None:
        """Take over a draft model.

        Args:
            settings: those of the method.
            model: the draft model.
            policy: ends chains.
            vocab_size: of the target; None for that of the draft model.
            pool: the phrases that greedy sequences share.
            costs: if known, they tell where plain chains draft more tokens per ms than forwards
                with phrases.
        """
        super().__init__(model, policy, vocab_size)
        self.settings = settings
        self.pool = pool
        self.span = settings.phrases[0]
        self.chooser = PhraseChooser(costs, self.span, settings.guesses)
        self.extra_positions = settings.guesses * self.span
        self.extra_nodes = settings.suffixes * self.span
        self.rows: dict[int, _Row] = {}

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: ChunkSize) -> Iterator[int]:
        """Run a prompt and learn its phrases."""
        yield from super().admit(seq, hidden, chunk)
        shared = self.pool if seq.greedy and seq.shares else None
        pool = shared if shared is not None else PhrasePool(*self.settings.phrases)
        self.rows[seq.id] = _Row(pool, pool.learn(seq.tokens))

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence. What a shared pool has learnt stays."""
        super().drop(seq)
        self.rows.pop(seq.id, None)

    def propose(self, seqs: list[Sequence]) -> Proposal:
        """Return a draft for each sequence.

        If forwards with phrases are not expected to pay, greedy sequences get plain chains.
        """
        greedy = sum(seq.greedy for seq in seqs)
        situation = StepSituation(max(1, greedy), mean_context(seqs))
        is_plain = not self.chooser.tries_phrases(situation)
        plain = []
        phrased = []
        for seq in seqs:
            if is_plain and seq.greedy:
                plain.append(Chain(seq, self._depth(seq)))
            else:
                phrased.append(_Phrased(seq, self._depth(seq)))
        proposals = []
        drafts: dict[int, Draft] = {}
        if plain:
            proposals.append(self._grow(plain, greedy))
            drafts |= zip([chain.seq.id for chain in plain], proposals[-1].drafts, strict=True)
        if phrased:
            proposals.append(self._grow_by_phrases(phrased))
            drafts |= zip([chain.seq.id for chain in phrased], proposals[-1].drafts, strict=True)
        notes = {}
        for chain in phrased:
            notes[chain.seq.id] = PhraseNote(len(chain.tokens), chain.suffixes)
        return Proposal.together([drafts[seq.id] for seq in seqs], proposals, PhraseMemo(notes))

    def _grow_by_phrases(self, chains: list[_Phrased]) -> Proposal:
        """Draft for all chains together, in forwards with phrases."""
        going = [chain for chain in chains if chain.depth > 0]
        for chain in going:
            chain.rule = self.policy.begin([chain.seq], 1)
        self._open.update(chain.seq.id for chain in going)
        forwards = 0
        seconds = 0.0
        while going:
            trees = [self._tree(chain) for chain in going]
            started_at = perf_counter()
            logits, _ = self.model.forward(
                [chain.seq.id for chain in going], [tree.draft() for tree in trees]
            )
            seconds += perf_counter() - started_at
            forwards += 1
            going = self._walk_all(going, trees, logits)
        drafts = [self._with_suffixes(chain) for chain in chains]
        policy_seconds = sum(chain.policy_seconds for chain in chains)
        return Proposal(drafts, forwards, seconds, policy_seconds)

    def _tree(self, chain: _Phrased) -> Tree:
        """Return the tokens that the draft model has not run, with phrases after them."""
        pending = chain.pending(self.model.length(chain.seq.id))
        tree = Tree(Draft.chain(pending[0], pending[1:]))
        tip = len(pending) - 1
        left = chain.depth - len(chain.tokens) - 1  # the forward itself gives one more token
        pool = self.rows[chain.seq.id].pool
        for phrase in pool.get(pending[-1], self.settings.guesses):
            tokens = phrase[:left]
            if self._knows(tokens or [0]):
                tree.branch(tip, tokens, "phrase")
        return tree

    def _walk_all(
        self, chains: list[_Phrased], trees: list[Tree], logits: list[Tensor]
    ) -> list[_Phrased]:
        """Draft tokens for all chains, from logits [N_r, V] of their trees' nodes.

        Keep the nodes that were walked, and return the chains that go on.
        """
        going = []
        paths = []
        for chain, tree, tree_logits in zip(chains, trees, logits, strict=True):
            before = len(chain.tokens)
            is_going, path = self._walk(chain, tree, tree_logits)
            paths.append(path)
            if is_going:
                going.append(chain)
            if "phrase" in tree.origins:
                self.chooser.observe(len(chain.tokens) - before)
        self.model.commit([chain.seq.id for chain in chains], paths)
        return going

    def _walk(self, chain: _Phrased, tree: Tree, logits: Tensor) -> tuple[bool, list[int]]:
        """Draft tokens while the tree contains them, from logits [N, V] of its nodes.

        Return whether to go on, and the nodes to keep.
        """
        assert chain.rule is not None
        length = self.model.length(chain.seq.id)
        node = len(chain.seq.tokens) + len(chain.tokens) - length - 1
        path = list(range(node + 1))
        tokens = _Tokens(chain, self._fitted(logits))
        while True:
            scores = tokens.draft(node)
            if scores is None:
                return False, path
            asked_at = perf_counter()
            (more,) = chain.rule.more(DraftState([chain.seq], [chain.tokens], scores))
            chain.policy_seconds += perf_counter() - asked_at
            is_going = more and self._goes_on(chain)
            child = tree.child(node, chain.tokens[-1])
            if not is_going or child is None:
                return is_going, path
            node = child
            path.append(node)

    def _with_suffixes(self, chain: _Phrased) -> Draft:
        """Return a chain's draft with phrases after it, as far as there is room."""
        draft = chain.draft()
        count = len(chain.tokens)
        left = chain.seq.remaining - 1 - count
        is_over = left < 1 or draft.tokens[-1] in chain.seq.eos or chain.seq.error is not None
        if is_over or not self.settings.suffixes:
            return draft
        tree = Tree(draft)
        pool = self.rows[chain.seq.id].pool
        for phrase in pool.get(draft.tokens[-1], self.settings.suffixes):
            nodes = tree.branch(count, phrase[:left], "phrase")
            chain.suffixes.append((phrase, nodes))
        return tree.draft()

    def observe(self, outcomes: abc.Sequence[RowOutcome], memo: PhraseMemo | None) -> None:
        """Learn phrases from the verdicts. The policy observes chains without the phrases after."""
        chains = []
        for outcome in outcomes:
            note = memo.notes.get(outcome.sequence.id) if memo is not None else None
            verdict = outcome.verdict
            count = outcome.draft.drafted if note is None else note.count
            is_rejected = verdict.rejected and verdict.accepted < count
            chains.append(replace(outcome, verdict=replace(verdict, rejected=is_rejected)))
            # A verdict has no argmax if a processor raised.
            if note is not None and verdict.argmax:
                self._learn(outcome, note)
        self.policy.observe(chains)
        self._crop([outcome.sequence for outcome in outcomes])

    def _learn(self, outcome: RowOutcome, note: PhraseNote) -> None:
        """Learn phrases from a verdict.

        Phrases after the chain give way to the target's tokens there, even if the chain was
        rejected before (unlike the original). From the first rejected token of the chain on, the
        target's tokens after each of them are phrases too.
        """
        row = self.rows[outcome.sequence.id]
        tokens = outcome.draft.tokens
        argmax = outcome.verdict.argmax
        end = note.count
        for phrase, nodes in note.suffixes:
            if len(nodes) == self.span:
                row.pool.drop(tokens[end], phrase)
                row.pool.add(tokens[end], [argmax[node] for node in (end, *nodes[:-1])])
        for node in range(outcome.verdict.accepted + 1, end - self.span + 2):
            row.pool.add(tokens[node], argmax[node : node + self.span])
        row.read = row.pool.learn(outcome.sequence.tokens, row.read)


class _Tokens:
    """Draft the tokens of a chain after the nodes of a tree, from the nodes' logits."""

    def __init__(self, chain: _Phrased, logits: Tensor) -> None:
        """Process all logits [N, V] at once, if the chain is greedy and no text matters."""
        sampler = chain.seq.sampler
        self._chain = chain
        self._scores = logits
        self._best: list[int] | None = None
        if sampler.greedy and sampler.prefix_free:
            self._scores = sampler.scores(logits, lambda _: [])
            self._best = argmax_of(self._scores).tolist()

    def draft(self, node: int) -> Tensor | None:
        """Add the token after a node to the chain, and return the scores [1, V] that gave it.

        Return None if no token is left to draft.
        """
        chain = self._chain
        scores = self._scores[node : node + 1]
        if self._best is not None:
            chain.add(self._best[node], None)
            return scores
        sources = [chain.seq.source(len(chain.tokens))]
        try:
            (token,), scores, q = next_tokens(
                [chain.seq.sampler], scores, lambda _: chain.text(), sources
            )
        except RowError:
            return None
        chain.add(token, None if q is None else q[0])
        return scores


def costs_by_phrases(settings: PacerOuroboros, costs: Costs) -> Costs:
    """Return the costs of chains that take `settings.share` forwards with phrases per token."""
    ms = settings.share * costs.drafting(1 + settings.guesses * (settings.ngram - 1))
    far = costs_by_phrases(settings, costs.far) if costs.far is not None else None
    return replace(costs, draft={1: ms}, chained=0.0, chained_sampled=0.0, far=far)
