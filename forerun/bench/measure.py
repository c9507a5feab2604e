"""A run: every method on every batch of prompts, in turns, in one process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
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
from forerun.engine.stats import Stats, summarise
from forerun.files import write_text
from forerun.model.causal_lm import CausalLM
from forerun.model.kv_cache import KVCache
from forerun.sampling.params import SamplingParams

WARM_UP, WARM_PROMPT = 16, 512  # new tokens, and the most of a prompt that is read for them
KNOWN_BYTES = 2**31  # for keys and values of known beginnings


@dataclass(frozen=True)
class Outcome:
    """What one batch of prompts gave.

    Attributes:
        tokens: output token ids of each row.
        seconds: wall time of the call, prefill included.
        target_forwards, draft_forwards: counted once for each row that took part. Transformers' first forward is the
            prefill and gives a token; our prefill gives none and is not counted.
        steps: of each row; None if the method keeps no record.
        cache: after a single row, what still has its keys and values in its first row; else None,
            because rows of a batch move while others leave.
        exact: whether the logits have the bits of forwards of the target that our methods run on.
        decoding: seconds after the first token of each row, for a method without steps that knows them. The first
            token comes with the prompt there.
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
            count, seconds = count - len(self.tokens), self.decoding or 0.0
        return count / seconds if count and seconds else None

    @property
    def stats(self) -> Stats:
        if self.steps is not None:
            return summarise([step for row in self.steps for step in row], self.seconds)
        count = sum(map(len, self.tokens))
        return Stats(
            count, self.target_forwards, self.draft_forwards, 0, 0, 0, self.seconds, (), ()
        )


# Prompts, a seed for each, and a length for the warm-up, which leaves no state but what a guard has measured. With a
# fourth argument, the number of tokens at the beginning of each prompt that are read before, untimed (`Runner.knows`).
Run = Callable[..., Outcome]


@dataclass(frozen=True)
class Loaded:
    """What a `Runner` is made of: the plan, its prompts as token ids, the target's tokenizer, if one was needed, and
    the target that our methods decode with."""

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
    """Measure what the plan says, and return the results; with `out` they are also there as files.

    `files` are the prompts of `read_files`. `resume` measures only what the records of `out` lack; pools of phrases
    begin empty then. `say` gets a line of progress after each batch, and `tell` a line for each
    greedy output that is not that of the plan's reference (`forerun.bench.unequal`).

    Raises ValueError for prompts, models or a folder that cannot be used. Prompts and folder are checked before the
    models' weights are loaded.
    """
    datasets, tokenizer = load_prompts(plan, files)
    check_known(plan, datasets)
    facts = facts_of_prompts(datasets)
    records: list[Record] = []
    if out is not None:
        records = open_folder(out, plan, {"prompts": facts, "versions": versions()}, resume)
    decoders, target = load_decoders(plan, tokenizer)
    if _has_known(datasets):
        decoders = {name: each.replace(prefix_bytes=KNOWN_BYTES) for name, each in decoders.items()}
    loaded = Loaded(plan, datasets, tokenizer, target)
    runs = {
        name: each.make(loaded)
        if isinstance(each, Runner)
        else decoder_run(decoders[name], plan.params())
        for name, each in plan.methods.items()
    }
    witness = None
    if not plan.temperature:
        requests = [decoder.request([0], plan.params()) for decoder in decoders.values()]
        ends = frozenset[int]().union(*(request.eos for request in requests))
        witness = Witness(target, ends, plan.max_new_tokens, plan.reference, out, tell)
    path = None if out is None else out / "records.jsonl"
    records = measure(plan, runs, datasets, path, records, say, witness)
    draft = next((each.draft for each in decoders.values() if each.draft is not None), None)
    costs = next((each.costs for each in decoders.values() if each.costs is not None), None)
    if costs is None and out is not None:
        costs = measure_costs(target, draft)
    found = results(plan, facts, records, costs)
    found["models"] = {"target": facts_of(target)}
    if draft is not None:
        found["models"]["draft"] = facts_of(draft)
    if out is not None:
        write_text(out / "results.json", json.dumps(found, indent=1) + "\n")
    return found


def check_known(plan: Plan, datasets: dict[str, list[Prompt]]) -> None:
    """Raise ValueError if prompts have known beginnings, and batches or a method cannot have them."""
    if not _has_known(datasets):
        return
    if plan.batch > 1:
        raise ValueError("prompts with a known beginning run one by one: leave out --batch")
    for name, each in plan.methods.items():
        if isinstance(each, Runner) and not each.knows:
            raise ValueError(
                f"method {name!r} cannot have read the `known` beginning of a prompt: leave it out"
            )


def _has_known(datasets: dict[str, list[Prompt]]) -> bool:
    return any(prompt.known for prompts in datasets.values() for prompt in prompts)


def facts_of_prompts(datasets: dict[str, list[Prompt]]) -> dict[str, dict[str, Any]]:
    """Return the number of prompts of each dataset and of cut ones among them, a hash of them all, and the mean number
    of tokens of a prompt, and of those that are known."""

    def facts(prompts: list[Prompt]) -> dict[str, Any]:
        digest = hashlib.sha256(
            json.dumps([(prompt.id, prompt.tokens) for prompt in prompts]).encode()
        ).hexdigest()
        found = {
            "prompts": len(prompts),
            "cut": sum(prompt.cut for prompt in prompts),
            "sha256": digest[:16],
        }
        tokens = {
            "tokens": round(
                sum(len(prompt.tokens or ()) for prompt in prompts) / max(1, len(prompts))
            )
        }
        known = sum(prompt.known for prompt in prompts)
        return found | tokens | ({"known": round(known / len(prompts))} if known else {})

    return {name: facts(prompts) for name, prompts in datasets.items()}


def measure(
    plan: Plan,
    runs: dict[str, Run],
    datasets: dict[str, list[Prompt]],
    path: Path | None = None,
    before: Sequence[Record] = (),
    say: Callable[[str], None] = lambda line: None,
    witness: Witness | None = None,
) -> list[Record]:
    """Measure all rounds but what was measured `before`, and return the records. With a path they are written there,
    those of a batch at once. A `witness` then looks at its outputs.

    The order of the methods turns by one from batch to batch and is reversed in every other round, so that none of
    them always comes first or always after the same other.
    """
    first = next(iter(datasets.values()))[: plan.batch]
    for run in runs.values():
        seeds = [plan.seed + i for i in range(len(first))]
        run([_ids(row)[:WARM_PROMPT] for row in first], seeds, min(WARM_UP, plan.max_new_tokens))
    records, done = [*before], {record.group for record in before}
    for number in range(plan.rounds):
        for dataset, prompts in datasets.items():
            for index, start in enumerate(range(0, len(prompts), plan.batch)):
                if (number, dataset, index) in done:
                    continue
                rows = prompts[start : start + plan.batch]
                seeds = [plan.seed + 1000 * number + start + i for i in range(len(rows))]
                order = turned(list(runs), number, index)
                given: list[Any] = [[_ids(row) for row in rows], seeds, None]
                if any(row.known for row in rows):
                    given.append([row.known for row in rows])
                outcomes = {name: runs[name](*given) for name in order}
                reference = plan.reference if not plan.temperature else None
                group = group_records((number, dataset, index), rows, outcomes, reference)
                records += group
                if path is not None:
                    with path.open("a", encoding="utf-8") as file:
                        file.write("".join(record.line() for record in group))
                if witness is not None:
                    witness.look((number, dataset, index), rows, sides_of(outcomes, len(rows)))
                say(
                    f"round {number + 1} of {plan.rounds}, {dataset}: {start + len(rows)} of {len(prompts)} prompts"
                )
    return records


def sides_of(outcomes: dict[str, Outcome], count: int) -> list[list[Side]]:
    """Return the runs of each of a batch's `count` prompts."""

    def side(name: str, outcome: Outcome, row: int) -> Side:
        steps = outcome.steps[row] if outcome.steps is not None else None
        return Side(name, outcome.tokens[row], steps, outcome.cache, outcome.exact)

    return [[side(name, each, row) for name, each in outcomes.items()] for row in range(count)]


def turned(names: Sequence[str], number: int, index: int) -> list[str]:
    """Return the order of the methods in a round, for the batch of that index."""
    turn = (number // 2 + index) % len(names)
    order = [*names[turn:], *names[:turn]]
    return order[::-1] if number % 2 else order


def group_records(
    group: Group, prompts: Sequence[Prompt], outcomes: dict[str, Outcome], reference: str | None
) -> list[Record]:
    """Return the records of one batch in one round, in the order in which the methods ran. Greedy outputs are compared
    with those of the method `reference`."""
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
    """Return what runs a method of ours. Each row has a seed of its own, so its neighbours do not matter.

    Phrases of earlier prompts stay, but a prompt that comes again finds none. Nor does it find keys and values, but
    those of its `known` beginning.
    """
    seen: set[tuple[int, ...]] = set()

    def read(text: Sequence[int]) -> None:
        """Let the models read a text, which the decoder then keeps."""
        decoder.session.add(
            [decoder.request(list(text), replace(params, seed=None, max_new_tokens=1))]
        ).collect()

    def run(
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        warm_up: int | None = None,
        known: Sequence[int] = (),
    ) -> Outcome:
        now = set(map(tuple, prompts))
        if now & seen:
            forget_phrases(decoder)
            seen.clear()
        seen.update(now)
        if decoder.options.prefix_bytes:
            decoder.close()  # with all that it knows
        length, session = warm_up or params.max_new_tokens, decoder.session
        target = session.engine.target
        cache = target.cache if isinstance(target, CausalLM) and len(prompts) == 1 else None
        if cache is not None:
            cache.keeps_dropped = (
                True  # because an unequal output is explained by what the row held
            )
        for prompt, count in zip(prompts, known, strict=False):
            read(prompt[:count])
        begun = perf_counter()
        requests = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            request = decoder.request(
                list(prompt), replace(params, seed=None, max_new_tokens=length)
            )
            # Most requests have no seed, so it is their acceptance rule that is measured.
            numbers = (
                None
                if params.temperature == 0
                else torch.Generator(decoder.target.device).manual_seed(seed)
            )
            requests.append(replace(request, generator=numbers))
        rows = session.add(requests).collect()
        seconds = perf_counter() - begun
        return Outcome(
            tokens=[[token for step in row for token in step.tokens] for row in rows],
            seconds=seconds,
            target_forwards=sum(map(len, rows)),
            draft_forwards=sum(step.draft_forwards for row in rows for step in row),
            steps=rows,
            cache=cache,
            exact=decoder.target.exact,
        )

    return run
