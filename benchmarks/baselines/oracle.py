"""Methods that know the target's output: how much any length rule could gain. For measurements only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import ClassVar

from torch import Tensor

from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence
from forerun.engine.session import Session
from forerun.engine.step import Drafter
from forerun.methods import Parts
from forerun.methods.ar import PlainDrafter
from forerun.methods.chain import ChainDrafter, Drafting
from forerun.methods.stop import DraftState, Fixed
from forerun.model.causal_lm import CausalLM


@dataclass(frozen=True)
class SeeingOracle(Drafting):
    """Stops right after the first token that will be rejected: the best that a stop rule can do. Greedy only."""

    name: ClassVar[str] = "seeing-oracle"
    greedy_only: ClassVar[bool] = True

    def policy(self, parts: Parts) -> MismatchStop:
        return MismatchStop(Truth(find=lambda seq: plainly(parts.target, seq)))


@dataclass(frozen=True)
class Oracle(SeeingOracle):
    """Drafts exactly the tokens that will be accepted: what knowing the length would be worth. Greedy only."""

    name: ClassVar[str] = "oracle"

    def build(self, parts: Parts) -> Drafter:
        assert parts.draft is not None
        return OracleDrafter(parts.draft, self.policy(parts), parts.target.vocab_size)


@dataclass
class Truth:
    """Known outputs by prompt, a tuple of tokens; grows. They hold for one pair of models and for greedy output without
    processors.

    Attributes:
        outputs: the target's output after the prompt.
        choices: the draft's own choice in place of each token of that output; -1 from where it cannot read on.
        find: decodes plainly: the output of a sequence from its prompt on, up to an end token or its limit. Needed for
            prompts that `outputs` lacks.
    """

    outputs: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    choices: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    find: Callable[[Sequence], list[int]] | None = None


class MismatchStop(Fixed):
    """Stops right after the first token that the target will reject. No rule that has to look at a token to judge it
    can do better.

    Outputs that `truth` lacks, or has too little of, are asked of `truth.find` in `admit`. They are remembered unless
    processors had a part in them: those of another request may differ. Where rounding makes a sequence part from its
    truth, this stops after every token; what is committed stays the target's.

    Raises ValueError in `admit` for a sampled sequence, and for an unknown one without `truth.find`.
    """

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.outputs: dict[int, list[int]] = {}

    def admit(self, seq: Sequence) -> None:
        if not seq.greedy:
            raise ValueError(
                "an oracle works for greedy decoding alone (temperature 0): what will be sampled cannot be known, and "
                "stopping before a token because it would be rejected changes the distribution of what follows"
            )
        output = [] if seq.sampler.processors else self.truth.outputs.get(prompt_of(seq), [])
        if not _reaches(seq, output):
            if self.truth.find is None:
                raise ValueError(
                    f"the truth of a prompt of {seq.prompt_length} tokens is unknown, and nothing finds it"
                )
            output = self.truth.find(seq)
            if not seq.sampler.processors:
                self.truth.outputs[prompt_of(seq)] = output
        self.outputs[seq.id] = output

    def drop(self, seq: Sequence) -> None:
        self.outputs.pop(seq.id, None)

    def more(self, state: DraftState) -> list[bool]:
        going = []
        for seq, tokens in zip(state.seqs, state.tokens, strict=True):
            at = len(seq.tokens) - seq.prompt_length + state.depth - 1
            going.append(self.outputs[seq.id][at : at + 1] == tokens[-1:])
        return going


def prompt_of(seq: Sequence) -> tuple[int, ...]:
    return tuple(seq.tokens[: seq.prompt_length])


def _reaches(seq: Sequence, output: list[int]) -> bool:
    """Whether an output goes as far as the sequence can; criteria can only end it earlier."""
    return len(output) >= seq.limit - seq.prompt_length or not seq.eos.isdisjoint(output)


class OracleDrafter(ChainDrafter):
    """Knows before it drafts how many of the draft's tokens the target will accept, and drafts these and no more: not
    even one where the first would be rejected. Hence a drafter: a policy is asked after a token, never before.

    The draft's choice in place of each token of the target's output does not depend on where steps begin, so one
    forward over the known output finds it in `admit`. Where rounding makes that forward differ from drafting, the
    policy stops after the mismatch. Raises ValueError in `admit` for a sampled sequence.
    """

    policy: MismatchStop

    def __init__(self, model: CausalLM, policy: MismatchStop, vocab_size: int | None = None) -> None:
        super().__init__(model, policy, vocab_size)
        self.runs: dict[int, list[int]] = {}  # from each token of the output on: how many the draft chooses as well

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        yield from super().admit(seq, hidden, chunk)
        output, known = self.policy.outputs[seq.id], self.policy.truth.choices
        choices = [] if seq.sampler.processors else known.get(prompt_of(seq), [])
        if len(choices) < len(output):
            choices = self._choices(seq, output)
            if not seq.sampler.processors:
                known[prompt_of(seq)] = choices
        runs = [0] * (len(output) + 1)
        for at in reversed(range(len(output))):
            runs[at] = runs[at + 1] + 1 if choices[at] == output[at] else 0
        self.runs[seq.id] = runs

    def drop(self, seq: Sequence) -> None:
        super().drop(seq)
        self.runs.pop(seq.id, None)

    def _depth(self, seq: Sequence) -> int:
        runs, at = self.runs[seq.id], len(seq.tokens) - seq.prompt_length
        return min(super()._depth(seq), runs[at] if at < len(runs) else 0)

    def _choices(self, seq: Sequence, output: list[int]) -> list[int]:
        """The draft's choice in place of each token of the output; -1 from where it cannot read on."""
        readable = [*prompt_of(seq), *output[:-1]][: self.model.context]
        readable = list(takewhile(lambda token: self._knows([token]), readable))
        first = seq.prompt_length
        if len(readable) < first:
            return [-1] * len(output)
        model = self.model.fresh()
        for _ in model.prefill(readable[: first - 1], first):
            pass
        model.join(0, len(readable))
        logits = self._fitted(model.extend([0], [readable[first - 1 :]])[0])
        choices = seq.sampler.scores(logits, lambda i: readable[: first + i]).argmax(-1).tolist()
        return choices + [-1] * (len(output) - len(choices))


def plainly(target: CausalLM, seq: Sequence) -> list[int]:
    """The target's own greedy output for a sequence, whatever its criteria."""
    driver = Session(Engine(target.fresh(), PlainDrafter()))
    (steps,) = driver.add([replace(seq.request, criteria=None, stop=None)]).collect()
    return [token for step in steps for token in step.tokens]
