"""Plain decoding of one GGUF file in several kinds of weights, in turns.

    python -m benchmarks.speed.weight_kinds FILE.gguf [--prompts 20] [--new-tokens 128]
        [--rounds 1] [--threads 2] [--out JSON]

All kinds are in one process and take turns on every prompt, in an order that changes. Two tables
follow. The first has tokens/s: of decoding, from the first new token to the last, and of the
prompt, up to the first new token; then ratios on the same prompt in the same round. The second has
the milliseconds of forwards of a few tokens after 128 others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from forerun.bench.report import provenance
from forerun.engine.draft import Draft

FORWARD_TOKENS = (1, 2, 4, 8, 16)  # new tokens of a forward
CONTEXT_TOKENS = 128  # tokens before these
BLOCK = 10  # forwards of one kind in succession, as in decoding
WARM_UP = 2  # untimed forwards before a block


@dataclass(frozen=True)
class Run:
    """One prompt, decoded once.

    Attributes:
        tokens: the output.
        first: seconds until its first token.
        rest: seconds from then to the last.
    """

    tokens: list[int]
    first: float
    rest: float


def decoding(decoder: forerun.Decoder, params: SamplingParams) -> Callable[[list[int]], Run]:
    """Return a function that decodes a prompt and measures it."""

    def run(prompt: list[int]) -> Run:
        session = decoder.session
        tokens: list[int] = []
        times: list[float] = []
        started_at = perf_counter()
        for batch in session.add([decoder.request(prompt, params)]):
            for _, step in batch:
                tokens += step.tokens
                times.append(perf_counter())
        return Run(tokens, times[0] - started_at, times[-1] - times[0])

    return run


def rates(runs: Sequence[Run], prompts: Sequence[list[int]]) -> list[tuple[float, float]]:
    """Return the tokens/s of each run: of decoding, and of its prompt."""
    pairs = zip(runs, prompts, strict=True)
    return [((len(run.tokens) - 1) / run.rest, len(prompt) / run.first) for run, prompt in pairs]


def ratios(runs: Sequence[Run], others: Sequence[Run]) -> dict[str, float]:
    """Return how many times as fast as the others these runs decode, over prompts and rounds."""
    values = [other.rest / run.rest for run, other in zip(runs, others, strict=True)]
    return {
        "median": round(median(values), 3),
        "lowest": round(min(values), 3),
        "highest": round(max(values), 3),
    }


def forwards(models: dict[str, Callable[[int], Any]], repeats: int) -> dict[str, dict[int, float]]:
    """Return the milliseconds of a forward by its number of tokens.

    They are the 20th percentile of all times, which other programs hardly disturb. The models take
    turns, block by block.
    """
    seconds: dict[str, dict[int, list[float]]] = {}
    for name in models:
        seconds[name] = {count: [] for count in FORWARD_TOKENS}
    for turn in range(-(-repeats // BLOCK)):
        for place, count in enumerate(FORWARD_TOKENS):
            for name in turned(list(models), turn, place):
                for repeat in range(BLOCK + WARM_UP):
                    started_at = perf_counter()
                    models[name](count)
                    if repeat >= WARM_UP:
                        seconds[name][count].append(perf_counter() - started_at)
    ms: dict[str, dict[int, float]] = {name: {} for name in models}
    for name, by_count in seconds.items():
        for count, times in by_count.items():
            ms[name][count] = round(1000 * sorted(times)[int(QUIET * len(times))], 3)
    return ms


def forward_of(decoder: forerun.Decoder, text: list[int]) -> Callable[[int], Any]:
    """Return a function that computes the logits of a chain of so many tokens."""
    model = decoder.target.fresh()
    list(model.prefill(text[:CONTEXT_TOKENS], CONTEXT_TOKENS))
    model.join(0, CONTEXT_TOKENS + FORWARD_TOKENS[-1])
    return lambda count: model.forward([0], [Draft.chain(text[0], text[1:count])])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"\n| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}", sep="\n")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all kinds of weights, print both tables, and return the results."""
    texts = questions(args.prompts)
    tokenizer = load_tokenizer(args.file)
    prompts = [asked(tokenizer, text) for text in texts]
    decoders: dict[str, forerun.Decoder] = {}
    load_seconds: dict[str, float] = {}
    for kind in args.kinds.split(","):
        started_at = perf_counter()
        decoders[kind] = forerun.load(
            args.file, weights=kind, method="ar", tokenizer=tokenizer, device="cpu", prefix_bytes=0
        )
        load_seconds[kind] = round(perf_counter() - started_at, 2)
    # The text before forwards: the questions, as often as it takes.
    text = [token for prompt in prompts for token in prompt] * CONTEXT_TOKENS
    models = {kind: forward_of(decoder, text) for kind, decoder in decoders.items()}
    figures = summary(take_turns(decoders, prompts, args), prompts * args.rounds)
    show_decoding(figures)
    ms = forwards(models, args.repeats) if args.repeats else {}
    if ms:
        show_forwards(ms)
    results = {
        "decoding": figures,
        "forward_ms": ms,
        "load_seconds": load_seconds,
        "targets": {kind: facts_of(decoder.target) for kind, decoder in decoders.items()},
        "file_bytes": Path(args.file).stat().st_size,
    }
    return results | provenance(vars(args) | {"file": Path(args.file).name, "out": None})


def take_turns(
    decoders: dict[str, forerun.Decoder], prompts: list[list[int]], args: argparse.Namespace
) -> dict[str, list[Run]]:
    """Return the runs of each kind, in the order of rounds and prompts."""
    params = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)
    decode = {kind: decoding(decoder, params) for kind, decoder in decoders.items()}
    names = list(decode)
    for name in names:
        decode[name](prompts[0])
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for number in range(args.rounds):
        for index, prompt in enumerate(prompts):
            for name in turned(names, number, index):
                runs[name].append(decode[name](prompt))
            assert all(len(some[-1].tokens) == args.new_tokens for some in runs.values())
            speeds = [
                f"{name} {args.new_tokens / some[-1].rest:.0f}" for name, some in runs.items()
            ]
            place = f"round {number + 1}, prompt {index + 1} of {len(prompts)}"
            print(f"{place}: {', '.join(speeds)}", flush=True)
    return runs


def summary(runs: dict[str, list[Run]], prompts: list[list[int]]) -> dict[str, Any]:
    """Return the figures of each kind; `prompts` are those of its runs."""
    figures = {}
    for name, own_runs in runs.items():
        speeds = rates(own_runs, prompts)
        others = {other: theirs for other, theirs in runs.items() if other != name}
        figures[name] = {
            "tokens_per_s": round(median(speed for speed, _ in speeds), 2),
            "prompt_tokens_per_s": round(median(speed for _, speed in speeds), 2),
            "same_output_as": {other: _same(own_runs, some) for other, some in others.items()},
            "over": {other: ratios(own_runs, some) for other, some in others.items()},
            "runs_tokens_per_s": [round(speed, 1) for speed, _ in speeds],
        }
    return figures


def show_decoding(figures: dict[str, Any]) -> None:
    over = [f"over {name}: median (lowest, highest)" for name in figures]
    rows = []
    for name, row in figures.items():
        cells = [_cell(row["over"], other) for other in figures]
        rows.append([name, str(row["tokens_per_s"]), str(row["prompt_tokens_per_s"]), *cells])
    table(["", "tokens/s", "prompt's tokens/s", *over], rows)


def show_forwards(ms: dict[str, dict[int, float]]) -> None:
    head = ["", *(f"{count}, ms" for count in FORWARD_TOKENS)]
    head += [f"{count} over 1" for count in FORWARD_TOKENS[1:]]
    rows = []
    for name, times in ms.items():
        row = [name, *(f"{time:.2f}" for time in times.values())]
        row += [f"{times[count] / times[1]:.2f}" for count in FORWARD_TOKENS[1:]]
        rows.append(row)
    table(head, rows)


def _same(runs: Sequence[Run], others: Sequence[Run]) -> str:
    same = sum(run.tokens == other.tokens for run, other in zip(runs, others, strict=True))
    return f"{same} of {len(runs)}"


def _cell(over: dict[str, dict[str, float]], name: str) -> str:
    return "{median:.2f} ({lowest:.2f}, {highest:.2f})".format(**over[name]) if name in over else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", metavar="FILE.gguf")
    parser.add_argument("--prompts", type=int, default=20, help="questions of questions.jsonl")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kinds", default="auto,int8,bfloat16,float32", help="of weights")
    parser.add_argument(
        "--repeats", type=int, default=20, help="forwards of each number of tokens; 0 for none"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.new_tokens < 2 or args.rounds < 1 or args.threads < 1 or args.repeats < 0:
        parser.error(
            "--new-tokens must be at least 2, --rounds and --threads at least 1, --repeats at "
            "least 0"
        )
    measured(parser, args, measure)
    if args.out is not None:
        print(f"\n{args.out} has all results")


if __name__ == "__main__":
    main()
