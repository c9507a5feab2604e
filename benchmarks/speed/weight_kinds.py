"""Plain decoding of one GGUF file in several kinds of weights, in turns.

    python -m benchmarks.speed.weight_kinds FILE.gguf [--prompts 20] [--new-tokens 128] [--rounds 1] [--threads 2] [--out JSON]

All are in one process and take turns on every prompt, in an order that changes. Two tables follow. The first has tokens
a second: of decoding, from the first new token to the last, and of the prompt, up to the first new token; then ratios
on the same prompt in the same round. The second has the milliseconds of forwards of a few tokens behind 128 others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import forerun
from benchmarks.quality.questions import asked, measured, questions
from forerun import SamplingParams
from forerun.api.loading import load_tokenizer
from forerun.backends.costs import QUIET
from forerun.backends.facts import facts_of
from forerun.bench.measure import turned
from forerun.bench.report import versions
from forerun.engine.draft import Draft

COUNTS = (1, 2, 4, 8, 16)  # tokens of a forward
BEHIND = 128
BLOCK = 10  # forwards of one kind behind each other, as in decoding


@dataclass(frozen=True)
class Run:
    """One prompt, decoded once.

    Attributes:
        tokens: the output.
        first: seconds until its first token was there.
        rest: seconds from then to the last.
    """

    tokens: list[int]
    first: float
    rest: float


def decoding(decoder: forerun.Decoder, params: SamplingParams) -> Callable[[list[int]], Run]:
    """Ours."""

    def run(prompt: list[int]) -> Run:
        session = decoder.session
        begun = perf_counter()
        tokens, times = [], []
        for batch in session.add([decoder.request(prompt, params)]):
            for _, step in batch:
                tokens += step.tokens
                times.append(perf_counter())
        return Run(tokens, times[0] - begun, times[-1] - times[0])

    return run


def rates(runs: Sequence[Run], prompts: Sequence[list[int]]) -> list[tuple[float, float]]:
    """Tokens a second of each run: decoding, and its prompt."""
    behind = zip(runs, prompts, strict=True)
    return [((len(run.tokens) - 1) / run.rest, len(prompt) / run.first) for run, prompt in behind]


def ratios(own: Sequence[Run], other: Sequence[Run]) -> dict[str, float]:
    """How many times as fast as another one it decodes: median, lowest and highest over prompts and rounds."""
    found = [theirs.rest / ours.rest for ours, theirs in zip(own, other, strict=True)]
    return {
        "median": round(median(found), 3),
        "lowest": round(min(found), 3),
        "highest": round(max(found), 3),
    }


def forwards(models: dict[str, Callable[[int], Any]], repeats: int) -> dict[str, dict[int, float]]:
    """Milliseconds of a forward by its number of tokens: of all times the 20th percentile, which other programs hardly
    disturb. Each block of forwards begins with two that warm up, and the models take turns."""
    seconds: dict[str, dict[int, list[float]]] = {
        name: {count: [] for count in COUNTS} for name in models
    }
    for turn in range(-(-repeats // BLOCK)):
        for place, count in enumerate(COUNTS):
            for name in turned(list(models), turn, place):
                for repeat in range(BLOCK + 2):
                    begun = perf_counter()
                    models[name](count)
                    if repeat >= 2:
                        seconds[name][count].append(perf_counter() - begun)
    return {
        name: {
            count: round(1000 * sorted(each)[int(QUIET * len(each))], 3)
            for count, each in own.items()
        }
        for name, own in seconds.items()
    }


def forward_of(decoder: forerun.Decoder, text: list[int]) -> Callable[[int], Any]:
    """Ours: logits of a chain of so many tokens, all of them."""
    model = decoder.target.fresh()
    list(model.prefill(text[:BEHIND], BEHIND))
    model.join(0, BEHIND + COUNTS[-1])
    return lambda count: model.forward([0], [Draft.chain(text[0], text[1:count])])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"\n| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}", sep="\n")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    texts = questions(given.prompts)
    tokenizer = load_tokenizer(given.file)
    prompts = [asked(tokenizer, each) for each in texts]
    params = SamplingParams(max_new_tokens=given.new_tokens, ignore_eos=True)
    kinds = given.kinds.split(",")
    decoders, loading = {}, {}
    for kind in kinds:
        begun = perf_counter()
        decoders[kind] = forerun.load(
            given.file, weights=kind, method="ar", tokenizer=tokenizer, device="cpu", prefix_bytes=0
        )
        loading[kind] = round(perf_counter() - begun, 2)
    # The text that forwards stand behind: the questions, as often as it takes.
    text = [token for prompt in prompts for token in prompt] * BEHIND
    runs = {kind: decoding(decoder, params) for kind, decoder in decoders.items()}
    models = {kind: forward_of(decoder, text) for kind, decoder in decoders.items()}
    names = list(runs)
    for run in runs.values():
        run(prompts[0])
    taken: dict[str, list[Run]] = {name: [] for name in names}
    for number in range(given.rounds):
        for index, prompt in enumerate(prompts):
            for name in turned(names, number, index):
                taken[name].append(runs[name](prompt))
            assert all(len(own[-1].tokens) == given.new_tokens for own in taken.values())
            rest = ", ".join(
                f"{name} {given.new_tokens / taken[name][-1].rest:.0f}" for name in names
            )
            print(f"round {number + 1}, prompt {index + 1} of {len(prompts)}: {rest}", flush=True)
    found: dict[str, Any] = {}
    for name, own in taken.items():
        speeds = rates(own, prompts * given.rounds)
        found[name] = {
            "tokens_per_s": round(median(speed for speed, _ in speeds), 2),
            "prompt_tokens_per_s": round(median(speed for _, speed in speeds), 2),
            "same_output_as": {
                other: _same(own, theirs) for other, theirs in taken.items() if other != name
            },
            "over": {
                other: ratios(own, theirs) for other, theirs in taken.items() if other != name
            },
            "runs_tokens_per_s": [round(speed, 1) for speed, _ in speeds],
        }
    table(
        [
            "",
            "tokens/s",
            "prompt's tokens/s",
            *(f"over {name}: median (lowest, highest)" for name in names),
        ],
        [
            [
                name,
                str(own["tokens_per_s"]),
                str(own["prompt_tokens_per_s"]),
                *(_cell(own["over"], o) for o in names),
            ]
            for name, own in found.items()
        ],
    )
    ms = forwards(models, given.repeats) if given.repeats else {}
    if ms:
        head = [
            "",
            *(f"{count}, ms" for count in COUNTS),
            *(f"{count} over 1" for count in COUNTS[1:]),
        ]
        rows = []
        for name, own in ms.items():
            rows.append([name, *(f"{each:.2f}" for each in own.values())])
            rows[-1] += [f"{own[count] / own[1]:.2f}" for count in COUNTS[1:]]
        table(head, rows)
    return {
        "decoding": found,
        "forward_ms": ms,
        "load_seconds": loading,
        "targets": {kind: facts_of(decoder.target) for kind, decoder in decoders.items()},
        "file_bytes": Path(given.file).stat().st_size,
        "arguments": vars(given) | {"file": Path(given.file).name, "out": None},
        "versions": versions(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    }


def _same(own: Sequence[Run], others: Sequence[Run]) -> str:
    return f"{sum(ours.tokens == theirs.tokens for ours, theirs in zip(own, others, strict=True))} of {len(own)}"


def _cell(over: dict[str, dict[str, float]], name: str) -> str:
    return "{median:.2f} ({lowest:.2f}, {highest:.2f})".format(**over[name]) if name in over else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", metavar="FILE.gguf")
    parser.add_argument("--prompts", type=int, default=20, help="questions of prompts.jsonl")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kinds", default="auto,int8,bfloat16,float32", help="of weights")
    parser.add_argument(
        "--repeats", type=int, default=20, help="forwards of each number of tokens; 0 for none"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.new_tokens < 2 or given.rounds < 1 or given.threads < 1 or given.repeats < 0:
        parser.error(
            "--new-tokens must be at least 2, --rounds and --threads at least 1, --repeats at least 0"
        )
    measured(parser, given, measure)
    if given.out is not None:
        print(f"\n{given.out} has it all")


if __name__ == "__main__":
    main()
