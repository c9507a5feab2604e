"""Explains an unequal output by comparing both runs with the same tokens computed anew.

Greedy outputs of a lossless method are those of plain decoding. If they are not, one of the two
runs was wrong. That may happen once in a thousand outputs, so all evidence is kept at once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from forerun.bench.datasets import Prompt
from forerun.bench.records import Group
from forerun.csrc import library as kernels
from forerun.engine.step import Step
from forerun.files import write_text
from forerun.model.causal_lm import CausalLM
from forerun.model.kv_cache import KVCache, Stored

UNEQUAL_FOLDER = "unequal"
MAX_FILES = 8  # of one method; where much is unequal, more files explain nothing further
MAX_ROUNDED_FILES = 2  # of a method whose kernels may round differently, and so often do
MAX_TOKENS = 32_768  # of a prompt or an output in a file
MAX_STEPS = 512  # of a run in a file
ONE_BY_ONE_TOKENS = 1024  # the last tokens that run one by one; those before them run in blocks
BLOCK_TOKENS = 64  # the last tokens that run as one block, whose logits [64, V] are held at once
PROMPT_CHUNK = 512  # tokens of a block of the prompt
BEST = 5  # how many tokens with the largest logits are kept
# What logits may differ by, relative to the largest, where kernels may round differently.
ROUNDING = 2**-8
STEP_COUNTS = ("number", "rows", "drafted", "tested", "accepted", "rests")
STEP_FIELDS = (*STEP_COUNTS, "tokens", "origins", "rejected")  # what is kept of a step
PARTS = ("keys", "values")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ID = 0  # of the only sequence of a cache


@dataclass(frozen=True)
class Side:
    """One of two runs that are compared.

    Attributes:
        tokens: the output.
        steps: the steps of the run; None if the method keeps no record.
        cache: a cache whose first row has the run's keys and values; None if they are gone.
        exact: "bitwise" if its logits must equal those computed anew in every bit.
    """

    name: str
    tokens: list[int]
    steps: list[Step] | None = None
    cache: KVCache | None = None
    exact: Literal["bitwise", "rounding"] = "rounding"


Sides = tuple[Side, Side]  # the reference and another run


@dataclass(frozen=True)
class Anew:
    """The last token of a text, run anew in a cache of its own.

    Attributes:
        logits: [V] float32.
        stored: keys and values of the whole text.
    """

    logits: Tensor
    stored: Stored

    @property
    def greedy(self) -> int:
        """Return the token with the largest logit."""
        return int(self.logits.argmax())


@dataclass(frozen=True)
class Verdict:
    """Which run was wrong.

    Attributes:
        wrong: the names of the runs whose token is not the greedy one; None if that is not known.
        text: the same in words.
    """

    wrong: tuple[str, ...] | None
    text: str


@dataclass
class Witness:
    """Explains unequal outputs of a benchmark.

    Attributes:
        target: the model, whose caches are left alone.
        ends: the tokens that end an output.
        most: number of tokens after which an output ends.
        reference: the method that the others are compared with.
        out: folder of the results, whose subfolder "unequal" gets a file for each unequal output;
            None for no files.
        tell: gets one line for each output.
    """

    target: CausalLM
    ends: frozenset[int]
    most: int
    reference: str
    out: Path | None
    tell: Callable[[str], None]
    _counts: Counter[str] = field(default_factory=Counter)

    def look(self, group: Group, prompts: Sequence[Prompt], rows: Sequence[Sequence[Side]]) -> None:
        """Explain the unequal outputs of a batch: `rows` are the runs of each of its prompts."""
        for prompt, sides in zip(prompts, rows, strict=True):
            plain = next(side for side in sides if side.name == self.reference)
            for side in sides:
                if side.tokens != plain.tokens:
                    self._explain(group, prompt, (plain, side))

    def _explain(self, group: Group, prompt: Prompt, sides: Sides) -> None:
        plain, side = sides
        most = MAX_FILES if _are_exact(sides) else MAX_ROUNDED_FILES
        self._counts[side.name] += 1
        if self._counts[side.name] > most:
            return
        number, dataset, batch = group
        facts = {"round": number, "dataset": dataset, "batch": batch, "prompt_id": prompt.id}
        at = first_difference(plain.tokens, side.tokens)
        assert prompt.tokens is not None
        verdict, evidence = self._evidence(list(prompt.tokens), sides, at)
        what = f"{side.name} differs from {plain.name} at output token {at}: {verdict.text}"
        line = f"unequal: {dataset}, prompt {prompt.id}, round {number + 1}: {what}"
        if self.out is None:
            self.tell(f"{line}; --out keeps what explains it")
            return
        parts = (*map(str, group), prompt.id, side.name)
        name = "-".join(_plain(part) for part in parts)
        path = self.out / UNEQUAL_FOLDER / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        write_text(path, json.dumps(facts | evidence, indent=1) + "\n")
        is_last = self._counts[side.name] == most
        rest = f"; further ones of {side.name} are not explained" if is_last else ""
        self.tell(f"{line}; see {path}{rest}")

    def _evidence(self, prompt: list[int], sides: Sides, at: int) -> tuple[Verdict, dict[str, Any]]:
        text = prompt + sides[0].tokens[:at]
        alone = ONE_BY_ONE_TOKENS if _are_exact(sides) else BLOCK_TOKENS
        new: dict[str, Anew] = {}
        try:
            new["one_by_one"] = computed_anew(self.target, text, alone, is_block=False)
            new["block"] = computed_anew(self.target, text, BLOCK_TOKENS, is_block=True)
            verdict = judged(sides, at, new, self._is_over(text, at))
        except Exception as error:  # because a run of hours must not end with this
            verdict = Verdict(None, f"the logits could not be computed anew: {error!r}")
        tokens = sorted({token for side in sides for token in side.tokens[at : at + 1]})
        return verdict, {
            "first_difference": at,
            "wrong": verdict.wrong,
            "verdict": verdict.text,
            "kernels": kernels.variant(),
            "build": kernels.build_id(),
            "prompt": _window(prompt, len(prompt)),
            "anew": {how: _facts_of_anew(anew, tokens) for how, anew in new.items()},
            "runs": {side.name: _facts_of_run(side, prompt, at, new) for side in sides},
        }

    def _is_over(self, text: Sequence[int], at: int) -> bool:
        """Return whether an output of `at` tokens, which end `text`, is complete."""
        return at >= self.most or (at > 0 and text[-1] in self.ends)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the first index at which two outputs differ.

    It is the length of the shorter output if the other one begins with it.
    """
    for i, (token, another) in enumerate(zip(one, other, strict=False)):
        if token != another:
            return i
    return min(len(one), len(other))


def computed_anew(target: CausalLM, tokens: Sequence[int], last: int, is_block: bool) -> Anew:
    """Run tokens in a new cache, the `last` of them one by one, or in one forward if `is_block`."""
    model = target.fresh()
    start = max(0, len(tokens) - last)
    for _ in model.prefill(tokens[:start], PROMPT_CHUNK):
        pass
    model.join(_ID, len(tokens))
    rest = list(tokens[start:])
    for chain in [rest] if is_block else [[token] for token in rest]:
        (logits,) = model.extend([_ID], [chain])
    return Anew(logits[-1].float().cpu(), model.cache.view(_ID, len(tokens)))


def judged(sides: Sides, at: int, new: dict[str, Anew], is_over: bool) -> Verdict:
    """Return which of two runs was wrong in what follows the first `at` tokens of its output.

    Args:
        sides: the two runs.
        at: number of tokens in which their outputs agree.
        new: the logits of these tokens, computed anew in two ways.
        is_over: whether the output should have ended there.
    """
    if is_over:
        return _blamed(sides, at, None, "the output ends there")
    alone, block = new["one_by_one"], new["block"]
    spread = float((alone.logits - block.logits).abs().max())
    is_exact = _are_exact(sides)
    if is_exact and spread:
        text = f"neither is known to be wrong, as logits computed anew differ by {spread:.3g}"
        return Verdict(None, f"{text} between one by one and one block")
    said = [token for side in sides for token in side.tokens[at : at + 1]]
    gap = max((float(alone.logits.max() - alone.logits[token]) for token in said), default=0.0)
    allowed = max(4 * spread, ROUNDING * float(alone.logits.abs().max()))
    if not is_exact and len(said) == len(sides) and gap <= allowed:
        text = f"both are within rounding, with logits up to {gap:.3g} below the largest"
        return Verdict((), text)
    return _blamed(sides, at, alone.greedy, f"token {alone.greedy} is the greedy one")


def _are_exact(sides: Sides) -> bool:
    return all(side.exact == "bitwise" for side in sides)


def _blamed(sides: Sides, at: int, token: int | None, reason: str) -> Verdict:
    """Return the verdict on runs that should have gone on with `token`, or ended for None."""
    right = [] if token is None else [token]
    wrong = tuple(side.name for side in sides if side.tokens[at : at + 1] != right)
    who = f"{wrong[0]} was" if len(wrong) == 1 else "both were"
    return Verdict(wrong, f"{who} wrong, as {reason}")


def first_unlike(one: Stored, other: Stored) -> dict[str, Any] | None:
    """Return the first position at which keys or values differ in any bit, and where.

    The layer is the first that differs there. Return None if all positions that both have are
    equal.
    """
    places: list[tuple[int, int, str]] = []
    for layer, (first, second) in enumerate(zip(one, other, strict=True)):
        if first is None or second is None:
            continue
        for name, part, other_part in zip(PARTS, first, second, strict=True):
            length = min(part.shape[1], other_part.shape[1])
            differs = _bits(part[:, :length]) != _bits(other_part[:, :length])
            positions = differs.any(-1).any(0).nonzero()
            if len(positions):
                places.append((int(positions[0]), layer, name))
    if not places:
        return None
    position, layer, name = min(places)
    return {"position": position, "layer": layer, "part": name}


def checksums(stored: Stored) -> dict[str, str]:
    """Return the first 16 digits of SHA-256 of all keys, and of all values."""
    pairs = [pair for pair in stored if pair is not None]
    keys = [pair[0] for pair in pairs]
    values = [pair[1] for pair in pairs]
    return {"keys": _hash(keys), "values": _hash(values)}


def _facts_of_run(side: Side, prompt: list[int], at: int, new: dict[str, Anew]) -> dict[str, Any]:
    facts: dict[str, Any] = {"exact": side.exact, "output": _window(side.tokens, at)}
    if side.steps is not None:
        facts["steps"] = _steps_to(side.steps, at)
    if side.cache is None:
        return facts | {"keys_and_values": None}
    # The last token of an output is never run.
    length = len(prompt) + min(at, len(side.tokens) - 1)
    stored = [
        (layer.keys[0, :, :length], layer.values[0, :, :length]) if layer.is_initialized else None
        for layer in side.cache.layers
    ]
    unlike = {how: first_unlike(stored, anew.stored) for how, anew in new.items()}
    entries = {"positions": length, **checksums(stored), "first_unlike": unlike}
    return facts | {"keys_and_values": entries}


def _facts_of_anew(anew: Anew, tokens: list[int]) -> dict[str, Any]:
    best = anew.logits.topk(min(BEST, len(anew.logits))).indices.tolist()
    chosen = dict.fromkeys([*best, *tokens])
    return {
        "greedy": anew.greedy,
        "logits": {str(token): float(anew.logits[token]) for token in chosen},
        "logits_sha256": _hash([anew.logits]),
        "keys_and_values": {"positions": _length(anew.stored), **checksums(anew.stored)},
    }


def _steps_to(steps: Sequence[Step], at: int) -> list[dict[str, Any]]:
    """Return the last MAX_STEPS steps up to the one that gave token `at` of the output."""
    kept = []
    count = 0
    for step in steps:
        kept.append({"first_token": count} | {name: getattr(step, name) for name in STEP_FIELDS})
        count += len(step.tokens)
        if count > at:
            break
    return kept[-MAX_STEPS:]


def _window(tokens: Sequence[int], at: int) -> dict[str, Any]:
    """Return at most MAX_TOKENS tokens around index `at`."""
    start = max(0, min(at - MAX_TOKENS // 2, len(tokens) - MAX_TOKENS))
    return {"count": len(tokens), "from": start, "tokens": list(tokens[start : start + MAX_TOKENS])}


def _length(stored: Stored) -> int:
    return max((pair[0].shape[1] for pair in stored if pair is not None), default=0)


def _bits(part: Tensor) -> Tensor:
    return part.view(_BITS[part.element_size()])


def _hash(parts: Sequence[Tensor]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(_bits(part).cpu().contiguous().numpy().data)
    return whole.hexdigest()[:16]


def _plain(name: str) -> str:
    """Return a name for files, of letters, digits, dots and underscores."""
    return re.sub(r"[^\w.]+", "_", name)[:60]
