"""Methods under load, in turns on the same requests: closed loops and open ones, beside static batches and
transformers' continuous batching.

    python -m benchmarks.serving.engine_load --methods ar,sd,static,static/sd,hf-batch --clients 4,16 --rate 2 --out RUN

`static` is `ar` in static batches, static/NAME another method in them; `hf-batch` is transformers' own, plain decoding.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import matplotlib
import torch
import typer
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.command import run
from benchmarks.peers.hf import Generate, load_peers
from benchmarks.serving.traffic import (
    EngineServer,
    Event,
    Job,
    Load,
    Served,
    Server,
    drive,
    figures,
    jobs_of,
    middle,
    rows_over_time,
)
from forerun.api.load import Decoder
from forerun.bench.datasets import Prompt
from forerun.bench.measure import WARM_UP, facts_of_prompts, turned
from forerun.bench.models import load_decoders, load_prompts
from forerun.bench.plan import Plan
from forerun.bench.report import provenance
from forerun.cli.bench import planned, progress, split
from forerun.files import write_text
from forerun.methods import METHODS, Method, is_method
from forerun.zoo import EMBEDDED

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BATCHING, STATIC = "hf-batch", "static"
STATIC_ROWS = 16  # requests of a static batch
PAGE, CHUNK = 32, 512  # tokens of a page of its cache, and the most tokens of one forward
POLL = 1.0  # seconds


class BatchingServer:
    """Transformers' own manager, which decodes in a thread of its own and notes when each token was there.

    Its cache holds `rows` requests of `length` tokens; prefixes are not shared, as ours are not in a bench.
    What is sampled follows from the seed and from when requests come: all rows draw from one source.
    """

    def __init__(self, peers: Generate, rows: int, length: int) -> None:
        config = GenerationConfig(
            **peers.drawing(), eos_token_id=sorted(peers.ends) or -1, pad_token_id=peers.pad
        )
        sizes = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=rows * -(-(length + 1) // PAGE) + 1,
            max_batch_tokens=CHUNK,
            max_requests_per_batch=rows,
            allow_block_sharing=False,
        )
        logging.getLogger("ContinuousBatchingLogger").setLevel(
            logging.CRITICAL
        )  # it misses psutil; failures come back
        model: Any = peers.target
        self.manager = model.init_continuous_batching(config, sizes)
        if peers.params.seed is not None:
            torch.manual_seed(peers.params.seed)
        self.manager.start()

    def add(self, job: Job) -> int:
        name = self.manager.add_request(
            list(job.prompt), max_new_tokens=job.new_tokens, record_timestamps=True
        )
        return int(name.removeprefix("req_"))

    def step(self, timeout: float | None) -> list[Event]:
        found = self.manager.get_result(timeout=POLL if timeout is None else min(timeout, POLL))
        if found is None:
            if not self.manager.is_running():
                raise RuntimeError(
                    f"transformers' continuous batching stopped: {self.manager.background_thread_status}"
                )
            return []
        if found.error is not None:
            raise RuntimeError(f"transformers' continuous batching failed: {found.error}")
        key, last = int(found.request_id.removeprefix("req_")), len(found.generated_tokens) - 1
        tokens = zip(found.generated_tokens, found.timestamps, strict=True)
        return [
            Event(key, found.lifespan[0]),
            *(Event(key, at, [token], index == last) for index, (token, at) in enumerate(tokens)),
        ]

    def close(self) -> None:
        """Ends the thread."""
        self.manager.stop(block=True)


def static(name: str, ours: Callable[[str], Method]) -> Method | None:
    """The method that is served in static batches by this name."""
    own = "ar" if name == STATIC else name.removeprefix(f"{STATIC}/")
    if own == name or not is_method(own):
        there = ", ".join((*METHODS, STATIC, f"{STATIC}/METHOD", BATCHING))
        raise ValueError(f"unknown method {name!r}; there are {there}")
    return ours(own)


def serve(
    plan: Plan,
    files: dict[str, list[Prompt]],
    loads: Sequence[Load],
    requests: int,
    lengths: tuple[int, int],
    batching: bool,
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measures loads of so many requests, of least and most new tokens, and returns the results; with `out` they are
    also there as files. `batching`: transformers' continuous batching too.

    Raises ValueError as `forerun.bench.measure.bench` does, and where there are fewer prompts than requests: phrases of
    a prompt that comes again would know its answer.
    """
    datasets, tokenizer = load_prompts(plan, files)
    prompts = [prompt.tokens or () for rows in datasets.values() for prompt in rows]
    if len(prompts) < requests:
        raise ValueError(
            f"--requests {requests} are more than the {len(prompts)} prompts, which come once each"
        )
    peers = load_peers(plan, assisted=False) if batching else None
    decoders, *_ = load_decoders(plan, tokenizer)
    longest = max(map(len, prompts)) + lengths[1]

    def server(name: str) -> Any:
        return _server(plan, name, decoders, peers, longest)

    names = [*plan.methods, *([BATCHING] if batching else [])]
    warm = 1, min(WARM_UP, lengths[1])
    rows = min(requests, max((load.clients or 8 for load in loads), default=8))
    for name in names:
        with server(name) as each:
            drive(each, jobs_of(Load(clients=rows), prompts, rows, warm, plan.seed), rows)
    found: dict[Load, dict[str, list[list[Served]]]] = {
        load: {name: [] for name in names} for load in loads
    }
    for number in range(plan.rounds):
        for index, load in enumerate(loads):
            jobs = jobs_of(load, prompts, requests, lengths, plan.seed + 1000 * number)
            for name in turned(names, number, index):
                with server(name) as each:
                    found[load][name].append(drive(each, jobs, load.clients))
                say(f"round {number + 1} of {plan.rounds}, {load.kind} {load.size}: {name}")
    arguments = plan.arguments() | {"requests": requests, "new_tokens": list(lengths)}
    results = _results(plan, names, found) | {
        "prompts": facts_of_prompts(datasets),
        **provenance(arguments),
    }
    if out is not None:
        for load in loads:
            plot_rows(
                {name: rounds[-1] for name, rounds in found[load].items()}, out / picture(load)
            )
        lines = [
            json.dumps(
                {
                    load.kind: load.size,
                    "method": name,
                    "round": number,
                    "requests": [*map(asdict, served)],
                }
            )
            for load, methods in found.items()
            for name, rounds in methods.items()
            for number, served in enumerate(rounds)
        ]
        write_text(out / "records.jsonl", "".join(f"{line}\n" for line in lines))
        write_text(out / "results.json", json.dumps(results, indent=1) + "\n")
        write_text(out / "report.md", markdown(results, [picture(load) for load in loads]))
    return results


@contextmanager
def _server(
    plan: Plan, name: str, decoders: dict[str, Decoder], peers: Generate | None, longest: int
) -> Iterator[Server]:
    if name != BATCHING:
        yield EngineServer(
            decoders[name], plan.params(), STATIC_ROWS if name.startswith(STATIC) else None
        )
        return
    assert peers is not None
    server = BatchingServer(peers, max(64, plan.batch), longest)
    try:
        yield server
    finally:
        server.close()


def _results(
    plan: Plan, names: Sequence[str], found: dict[Load, dict[str, list[list[Served]]]]
) -> dict[str, Any]:
    """{kind: {size: figures}} of the first method of ours that is named, then of all."""
    methods: dict[str, dict[str, Any]] = {name: {} for name in names}
    for load, each in found.items():
        for name, rounds in each.items():
            methods[name].setdefault(load.kind, {})[load.size] = _compared(
                rounds, each, not plan.temperature
            )
    chief = next(
        (name for name in plan.methods if name != "ar" and not name.startswith(STATIC)), "ar"
    )
    first = {
        kind: {size: {"method": chief} | each for size, each in sizes.items()}
        for kind, sizes in methods[chief].items()
    }
    return first | {"methods": methods}


def _compared(
    rounds: list[list[Served]], others: dict[str, list[list[Served]]], greedy: bool
) -> dict[str, Any]:
    """A method's figures under one load, its tokens/s over each other method's, and the share of its
    greedy outputs that are those of `ar`."""
    own = [figures(served) for served in rounds]
    over = {
        name: round(
            median(
                a["tokens_per_s"] / figures(b)["tokens_per_s"]
                for a, b in zip(own, other, strict=True)
            ),
            4,
        )
        for name, other in others.items()
    }
    found: dict[str, Any] = middle(own) | {"over": over}
    if greedy:
        pairs = [
            pair
            for a, b in zip(rounds, others["ar"], strict=True)
            for pair in zip(a, b, strict=True)
        ]
        equal = [one.tokens == reference.tokens for one, reference in pairs]
        found["exact_match"] = round(sum(equal) / len(equal), 4)
    return found


LOAD_COLUMNS = {
    "tokens/s": "tokens_per_s",
    "first token, ms, p50": "ttft_ms_p50",
    "p99": "ttft_ms_p99",
    "token, ms, p50": "tpot_ms_p50",
    "p99 ": "tpot_ms_p99",
    "longest gap, ms": "gap_ms_max",
}


def tables(results: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Title and rows of a table for each load, the header first."""
    found = []
    for kind in ("clients", "rate"):
        for size in results.get(kind, {}):
            title = f"{size} clients" if kind == "clients" else f"{size} requests a second"
            rows = [["method", *map(str.strip, LOAD_COLUMNS), "over ar", "same tokens"]]
            for name, method in results["methods"].items():
                each = method[kind][size]
                same = "" if "exact_match" not in each else f"{100 * each['exact_match']:.4g} %"
                rows.append([name, *(f"{each[key]:.1f}" for key in LOAD_COLUMNS.values())])
                rows[-1] += [f"{each['over']['ar']:.2f}", same]
            found.append((title, rows))
    return found


def markdown(results: dict[str, Any], pictures: list[str]) -> str:
    """report.md."""
    arguments, versions = results["arguments"], results["versions"]
    lines = [
        f"# {arguments['target']} under load",
        "",
        f"{results['date']}, {versions['gpu'] or versions['cpu']}, {versions['threads']} threads, "
        f"torch {versions['torch']}, transformers {versions['transformers']}, forerun at {versions['commit']}.",
        "",
    ]
    for title, (header, *rows) in tables(results):
        lines += [
            f"## {title}",
            "",
            "| " + " | ".join(header) + " |",
            "|---" + "|---:" * (len(header) - 1) + "|",
        ]
        lines += [*("| " + " | ".join(row) + " |" for row in rows), ""]
    least, most = arguments["new_tokens"]
    lines += [
        "## How to read it",
        "",
        f"- Each load has {arguments['requests']} requests of {least} to {most} new tokens. Figures are medians over "
        "rounds; percentiles are over the requests of a round. Methods take turns on the same requests.",
        "- A closed loop keeps that many requests open. In an open loop they come by a clock (Poisson), and the time "
        "to the first token counts from when a request was due.",
        f"- gap: the time between two steps that brought a request's tokens. `static` starts a batch of {STATIC_ROWS} "
        "when the one before has ended. `hf-batch` is transformers' continuous batching, plain decoding.",
        "",
        *(f"![{name}]({name})" for name in pictures),
    ]
    return "\n".join(lines).rstrip() + "\n"


def picture(load: Load) -> str:
    return f"rows-{load.kind}-{load.size}.png"


def plot_rows(methods: dict[str, list[Served]], path: Path) -> None:
    """Draws how many requests of a load are open, and how many have their first token, over time."""
    figure, axes = plt.subplots(
        len(methods), figsize=(8, 1.6 * len(methods) + 0.6), sharex=True, squeeze=False
    )
    for (name, served), own in zip(methods.items(), axes[:, 0], strict=True):
        own.step(
            *rows_over_time(served, lambda one: one.due),
            where="post",
            color="#adb5bd",
            label="open",
        )
        own.step(
            *rows_over_time(served, lambda one: one.times[0]),
            where="post",
            color="#264653",
            label="decoding",
        )
        own.set(ylim=(0, None))
        own.set_title(name, loc="left", fontsize="small")
    axes[0, 0].legend(fontsize=8)
    axes[-1, 0].set_xlabel("seconds")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main(
    methods: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join((*METHODS, STATIC, BATCHING))}.")
    ] = None,
    clients: Annotated[
        list[str] | None, typer.Option(help="So many requests are always open, as in 1,4,16.")
    ] = None,
    rate: Annotated[
        list[str] | None, typer.Option(help="Requests a second, Poisson arrivals, as in 2,4.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each load.")] = 64,
    new_tokens: Annotated[
        str, typer.Option(help="Least and most new tokens of a request.")
    ] = "16:256",
    method_arg: Annotated[
        list[str] | None, typer.Option(help="As in sd.gamma=6; repeatable.")
    ] = None,
    dataset: Annotated[list[str] | None, typer.Option(help="As of `forerun bench`.")] = None,
    data: Annotated[Path | None, typer.Option(help="As of `forerun bench`.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first prompts of each dataset.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are messages.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 2,
    out: Annotated[
        Path | None, typer.Option(help="Folder for records, results, report and pictures.")
    ] = None,
    target: Annotated[str, typer.Option(help="Hub id, folder or GGUF file.")] = EMBEDDED,
    draft: Annotated[str | None, typer.Option(help="Hub id or folder of the draft.")] = None,
    head: Annotated[
        list[str] | None, typer.Option(help="Folder of a head of the target's.")
    ] = None,
    pre_verifier: Annotated[Path | None, typer.Option(help="Folder of the trained layer.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="1 is all.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Length of the standard library's prompts.")
    ] = 128,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="End at the end token.")
    ] = False,
    guard: Annotated[
        bool, typer.Option("--guard", help="Leave drafts out while they do not pay.")
    ] = False,
    dtype: Annotated[str | None, typer.Option()] = None,
    weights: Annotated[str | None, typer.Option()] = None,
    draft_weights: Annotated[str | None, typer.Option()] = None,
    device: Annotated[str | None, typer.Option()] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads to compute with.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end, nothing else.")
    ] = False,
) -> None:
    """Measure methods under load, in turns on the same requests, in one process. Lists may be given with commas."""
    given = locals()
    loads = [Load(clients=int(each)) for each in numbers("--clients", clients)]
    loads += [Load(rate=each) for each in numbers("--rate", rate)]
    if not loads:
        raise ValueError("give --clients or --rate: how requests come")
    low, _, high = new_tokens.partition(":")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise ValueError(f"--new-tokens must be MIN:MAX with 1 <= MIN <= MAX, not {new_tokens!r}")
    names = split(methods)
    ours = [name for name in names if name != BATCHING]
    more = {"max_new_tokens": int(high), "batch": max(load.clients or 1 for load in loads)}
    plan, files = planned(given | {"methods": ours, "tune": None}, static, **more)
    lengths = int(low), int(high)
    if out is not None:
        if (out / "records.jsonl").exists():
            raise ValueError(f"{out} holds a run already: give another --out")
        out.mkdir(parents=True, exist_ok=True)
    results = serve(plan, files, loads, requests, lengths, BATCHING in names, out, progress)
    progress("")
    if as_json:
        print(json.dumps(results))
        return
    for title, rows in tables(results):
        print(f"{title}", *("  ".join(f"{cell:>14}" for cell in row) for row in rows), sep="\n")


def numbers(option: str, values: list[str] | None) -> list[float]:
    """The numbers of an option. Raises ValueError where one is none, or not above 0; clients are whole."""
    try:
        found = [float(part) for part in split(values)]
    except ValueError as error:
        raise ValueError(f"{option} takes numbers: {error}") from None
    least = 1 if option == "--clients" else 0
    if any(each < least or each == 0 or (least and each != int(each)) for each in found):
        raise ValueError(
            f"{option} must be {'whole numbers of at least 1' if least else 'above 0'}"
        )
    return found


if __name__ == "__main__":
    run(main)
