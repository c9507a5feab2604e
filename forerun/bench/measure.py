"""A run: every method on every batch of prompts, in turns, in one process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from forerun.api.decoder import Decoder
from forerun.backends.costs import measure_costs
from forerun.backends.facts import facts_of
from forerun.bench.datasets import Prompt
from forerun.bench.models import load_decoders, load_prompts
from forerun.bench.plan import Plan, Runner
from forerun.bench.records import Group, Record, open_folder, times
from forerun.bench.report import results, versions
from forerun.bench.unequal import Side, Witness
from forerun.engine.engine import Step
from forerun.engine.sequence import Request
from forerun.engine.stats import Stats, summarise
from forerun.files import write_text
from forerun.model.causal_lm import CausalLM
from forerun.model.kv_cache import KVCache
from forerun.sampling.params import SamplingParams

WARM_UP = 16  # new tokens of the warm-up
WARM_PROMPT = 512  # the most tokens of a prompt that the warm-up reads
KNOWN_BYTES = 2**31  # for keys and values of known beginnings


@dataclass(frozen=True)
class Outcome:
    """The result of one batch of prompts.

    Attributes:
        tokens: output token ids of each row.
        seconds: wall time of the call, including the prefill.
        target_forwards: counted once for each row that took part. In transformers the first forward
            is the prefill and gives a token; our prefill gives none and is not counted.
        draft_forwards: counted in the same way.
        steps: the steps of each row; None if the method keeps no record.
        cache: after a single row, the cache whose first row still has its keys and values; else
            None, because rows of a batch move when others leave.
        exact: "bitwise" if the logits have the bits of the target's forwards on which our methods
            run.
        decoding: seconds after the first token of each row, for a method without steps that knows
            them. The first token comes with the prompt there.
    """

    tokens: list[list[int]]
    seconds: float
    target_forwards: int
    draft_forwards: int
    steps: list[list[Step]] | None = None
    cache: KVCache | None = None
    exact: Literal["bitwise", "rounding"] = "rounding"
    decoding: float | None = None

    @property
    def decoding_tokens_per_s(self) -> float | None:
        """Return tokens/s without the time of reading prompts, or None if that is unknown."""
        count = sum(map(len, self.tokens))
        if self.steps is not None:
            seconds = times(self.steps).seconds
        else:
            count -= len(self.tokens)
            seconds = self.decoding or 0.0
        return count / seconds if count and seconds else None

    @property
    def stats(self) -> Stats:
        """Return the statistics of all rows together."""
        if self.steps is not None:
            return summarise([step for row in self.steps for step in row], self.seconds)
        count = sum(map(len, self.tokens))
        return Stats(
            count, self.target_forwards, self.draft_forwards, 0, 0, 0, self.seconds, (), ()
        )


# Decodes a batch. The arguments are the prompts, a seed for each, and None or a length for the
# warm-up, which leaves no state but what a guard has measured. A fourth argument is the number of
# tokens at the beginning of each prompt that are read before, untimed (`Runner.knows`).
Run = Callable[..., Outcome]


@dataclass(frozen=True)
class Loaded:
    """What a `Runner` is made of.

    Attributes:
        plan: the plan.
        datasets: its prompts, as token ids.
        tokenizer: the target's tokenizer, if one was needed.
        target: the target with which our methods decode.
    """

    plan: Plan
    datasets: dict[str, list[Prompt]]
    tokenizer: PreTrainedTokenizerBase | None
    target: CausalLM


def bench(
    plan: Plan,
    files: dict[str, list[Prompt]],
    out: Path | None = None,
    *,
    resume: bool = False,
    say: Callable[[str], None] = lambda line: None,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure what the plan says, and return the results.

    Args:
        plan: the plan.
        files: the prompts of `read_files`.
        out: the folder that gets the results as files, if any.
        resume: measure only what the records of `out` lack; pools of phrases begin empty then.
        say: gets a line of progress after each batch.
        tell: gets a line for each greedy output that is not that of the plan's reference
            (`forerun.bench.unequal`).

    Raises:
        ValueError: prompts, models or a folder cannot be used. Prompts and folder are checked
            before the models' weights are loaded.
    """
    datasets, tokenizer = load_prompts(plan, files)
    check_known(plan, datasets)
    facts = facts_of_prompts(datasets)
    records: list[Record] = []
    if out is not None:
        records = open_folder(out, plan, {"prompts": facts, "versions": versions()}, resume)
    decoders, target = load_decoders(plan, tokenizer)
    if _has_known(datasets):
        decoders = {
            name: decoder.replace(prefix_bytes=KNOWN_BYTES) for name, decoder in decoders.items()
        }
    runs = _runs(Loaded(plan, datasets, tokenizer, target), decoders)
    witness = None if plan.temperature else _witness(plan, decoders, target, out, tell)
    path = None if out is None else out / "records.jsonl"
    records = measure(plan, runs, datasets, path, records, say, witness)
    every = decoders.values()
    draft = next((decoder.draft for decoder in every if decoder.draft is not None), None)
    costs = next((decoder.costs for decoder in every if decoder.costs is not None), None)
    if costs is None and out is not None:
        costs = measure_costs(target, draft)
    report = results(plan, facts, records, costs)
    report["models"] = {"target": facts_of(target)}
    if draft is not None:
        report["models"]["draft"] = facts_of(draft)
    if out is not None:
        write_text(out / "results.json", json.dumps(report, indent=1) + "\n")
    return report


def _runs(loaded: Loaded, decoders: dict[str, Decoder]) -> dict[str, Run]:
    """Return what runs each method of the plan."""
    runs: dict[str, Run] = {}
    for name, method in loaded.plan.methods.items():
        if isinstance(method, Runner):
            runs[name] = method.make(loaded)
        else:
            runs[name] = decoder_run(decoders[name], loaded.plan.params())
    return runs


def _witness(
    plan: Plan,
    decoders: dict[str, Decoder],
    target: CausalLM,
    out: Path | None,
    tell: Callable[[str], None],
) -> Witness:
    """Return what explains unequal outputs."""
    requests = [decoder.request([0], plan.params()) for decoder in decoders.values()]
    ends = frozenset[int]().union(*(request.eos for request in requests))
    return Witness(target, ends, plan.max_new_tokens, plan.reference, out, tell)


def check_known(plan: Plan, datasets: dict[str, list[Prompt]]) -> None:
    """Raise ValueError if prompts have known beginnings that the plan cannot measure."""
    if not _has_known(datasets):
        return
    if plan.batch > 1:
        raise ValueError("prompts with a known beginning run one by one: leave out --batch")
    for name, method in plan.methods.items():
        if isinstance(method, Runner) and not method.knows:
            raise ValueError(
                f"method {name!r} cannot have read the `known` beginning of a prompt: leave it out"
            )


def _has_known(datasets: dict[str, list[Prompt]]) -> bool:
    return any(prompt.known for prompts in datasets.values() for prompt in prompts)


def facts_of_prompts(datasets: dict[str, list[Prompt]]) -> dict[str, dict[str, Any]]:
    """Return facts of each dataset.

    They are the number of prompts and of cut ones among them, a hash of them all, and the mean
    number of tokens of a prompt, and of those that are known.
    """
    return {name: _facts_of_dataset(prompts) for name, prompts in datasets.items()}


def _facts_of_dataset(prompts: list[Prompt]) -> dict[str, Any]:
    text = json.dumps([(prompt.id, prompt.tokens) for prompt in prompts])
    tokens = sum(len(prompt.tokens or ()) for prompt in prompts)
    known = sum(prompt.known for prompt in prompts)
    facts: dict[str, Any] = {
        "prompts": len(prompts),
        "cut": sum(prompt.cut for prompt in prompts),
        "sha256": hashlib.sha256(text.encode()).hexdigest()[:16],
        "tokens": round(tokens / max(1, len(prompts))),
    }
    if known:
        facts["known"] = round(known / len(prompts))
    return facts


def measure(
    plan: Plan,
    runs: dict[str, Run],
    datasets: dict[str, list[Prompt]],
    path: Path | None = None,
    before: Sequence[Record] = (),
    say: Callable[[str], None] = lambda line: None,
    witness: Witness | None = None,
) -> list[Record]:
    """Measure all rounds except what was measured `before`, and return the records.

    With a path the records are written there, those of a batch at once. A `witness` then looks at
    the outputs.

    The order of the methods is rotated by one from batch to batch and is reversed in every other
    round, so that no method always comes first or always after the same other.
    """
    _warm_up(plan, runs, next(iter(datasets.values()))[: plan.batch])
    records = [*before]
    done = {record.group for record in before}
    reference = plan.reference if not plan.temperature else None
    for group, rows in _batches(plan, datasets):
        if group in done:
            continue
        number, dataset, index = group
        start = index * plan.batch
        seeds = [plan.seed + 1000 * number + start + i for i in range(len(rows))]
        given: list[Any] = [[_ids(row) for row in rows], seeds, None]
        if any(row.known for row in rows):
            given.append([row.known for row in rows])
        outcomes = {name: runs[name](*given) for name in turned(list(runs), number, index)}
        batch_records = group_records(group, rows, outcomes, reference)
        records += batch_records
        if path is not None:
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(record.line() for record in batch_records))
        if witness is not None:
            witness.look(group, rows, sides_of(outcomes, len(rows)))
        say(
            f"round {number + 1} of {plan.rounds}, {dataset}: {start + len(rows)} of "
            f"{len(datasets[dataset])} prompts"
        )
    return records


def _warm_up(plan: Plan, runs: dict[str, Run], prompts: Sequence[Prompt]) -> None:
    """Let every method decode a few tokens, so that the first batch is not slower than others."""
    seeds = [plan.seed + i for i in range(len(prompts))]
    for run in runs.values():
        texts = [_ids(prompt)[:WARM_PROMPT] for prompt in prompts]
        run(texts, seeds, min(WARM_UP, plan.max_new_tokens))


def _batches(plan: Plan, datasets: dict[str, list[Prompt]]) -> Iterator[tuple[Group, list[Prompt]]]:
    """Yield the batches of all rounds, in the order in which they are measured."""
    for number in range(plan.rounds):
        for dataset, prompts in datasets.items():
            for index, start in enumerate(range(0, len(prompts), plan.batch)):
                yield (number, dataset, index), prompts[start : start + plan.batch]


def sides_of(outcomes: dict[str, Outcome], count: int) -> list[list[Side]]:
    """Return for each of a batch's `count` prompts the runs of all methods."""
    return [_sides_of_row(outcomes, row) for row in range(count)]


def _sides_of_row(outcomes: dict[str, Outcome], row: int) -> list[Side]:
    sides = []
    for name, outcome in outcomes.items():
        steps = outcome.steps[row] if outcome.steps is not None else None
        sides.append(Side(name, outcome.tokens[row], steps, outcome.cache, outcome.exact))
    return sides


def turned(names: Sequence[str], number: int, index: int) -> list[str]:
    """Return the order of the methods in round `number`, for the batch with this index."""
    turn = (number // 2 + index) % len(names)
    order = [*names[turn:], *names[:turn]]
    return order[::-1] if number % 2 else order


def group_records(
    group: Group, prompts: Sequence[Prompt], outcomes: dict[str, Outcome], reference: str | None
) -> list[Record]:
    """Return the records of one batch in one round, in the order in which the methods ran.

    Greedy outputs are compared with those of the method `reference`.
    """
    records = []
    for name, outcome in outcomes.items():
        equal = None
        if reference is not None:
            pairs = zip(outcome.tokens, outcomes[reference].tokens, strict=True)
            equal = [ours == theirs for ours, theirs in pairs]
        records.append(
            Record(
                *group,
                prompts=[prompt.id for prompt in prompts],
                method=name,
                stats=outcome.stats,
                times=times(outcome.steps) if outcome.steps is not None else None,
                equal=equal,
                decoding_tokens_per_s=outcome.decoding_tokens_per_s,
            )
        )
    return records


def _ids(prompt: Prompt) -> list[int]:
    assert prompt.tokens is not None
    return list(prompt.tokens)


def forget_phrases(decoder: Decoder) -> None:
    """Empty the decoder's pools, which would know the output of a prompt that comes again."""
    for pool in (decoder.pools or {}).values():
        pool.clear()


def decoder_run(decoder: Decoder, params: SamplingParams) -> Run:
    """Return what runs a method of ours.

    Each row has a seed of its own, so its neighbours do not matter. Phrases of earlier prompts
    stay, but a prompt that comes again finds none. It finds no keys and values either, except those
    of its `known` beginning.
    """
    return _DecoderRun(decoder, params)


class _DecoderRun:
    """What runs a method of ours (`decoder_run`)."""

    def __init__(self, decoder: Decoder, params: SamplingParams) -> None:
        self._decoder = decoder
        self._params = params
        self._seen: set[tuple[int, ...]] = set()

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        warm_up: int | None = None,
        known: Sequence[int] = (),
    ) -> Outcome:
        decoder = self._decoder
        self._forget(prompts)
        length = warm_up or self._params.max_new_tokens
        session = decoder.session
        target = session.engine.target
        cache = target.cache if isinstance(target, CausalLM) and len(prompts) == 1 else None
        if cache is not None:
            # Because an unequal output is explained by what the row held.
            cache.keeps_dropped = True
        for prompt, count in zip(prompts, known, strict=False):
            self._read(prompt[:count])
        started_at = perf_counter()
        requests = [
            self._request(prompt, seed, length) for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        rows = session.add(requests).collect()
        seconds = perf_counter() - started_at
        return Outcome(
            tokens=[_tokens_of(row) for row in rows],
            seconds=seconds,
            target_forwards=sum(map(len, rows)),
            draft_forwards=sum(step.draft_forwards for row in rows for step in row),
            steps=rows,
            cache=cache,
            exact=decoder.target.exact,
        )

    def _forget(self, prompts: Sequence[Sequence[int]]) -> None:
        """Drop what would make a prompt easier that comes again."""
        texts = set(map(tuple, prompts))
        if texts & self._seen:
            forget_phrases(self._decoder)
            self._seen.clear()
        self._seen.update(texts)
        if self._decoder.options.prefix_limit:
            self._decoder.close()  # with all keys and values that it knows

    def _read(self, text: Sequence[int]) -> None:
        """Let the models read a text, whose keys and values the decoder then keeps."""
        params = replace(self._params, seed=None, max_new_tokens=1)
        self._decoder.session.add([self._decoder.request(list(text), params)]).collect()

    def _request(self, prompt: Sequence[int], seed: int, length: int) -> Request:
        """Return the request of a row.

        It has no seed, because most requests have none, so it is their acceptance rule that is
        measured.
        """
        params = replace(self._params, seed=None, max_new_tokens=length)
        request = self._decoder.request(list(prompt), params)
        if params.temperature == 0:
            return replace(request, generator=None)
        numbers = torch.Generator(self._decoder.target.device).manual_seed(seed)
        return replace(request, generator=numbers)


def _tokens_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]
