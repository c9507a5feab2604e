"""Methods under load, in turns on the same requests, in one process without a server.

    python -m benchmarks.serving.engine_load --methods ar,sd,static,static/sd,hf-batch \
        --clients 4,16 --rate 2 --out RUN

Loads are closed loops and open ones. `static` is `ar` in static batches, and static/NAME another
method in them; `hf-batch` is transformers' own continuous batching, plain decoding.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
    medians,
    rows_over_time,
)
from forerun.api.load import Decoder
from forerun.bench.datasets import Prompt
from forerun.bench.measure import WARM_UP, facts_of_prompts, turned
from forerun.bench.models import load_decoders, load_prompts
from forerun.bench.plan import Plan
from forerun.bench.report import provenance
from forerun.cli.bench import planned, progress, split
from forerun.cli.options import JsonOption, LoadOptions, TemperatureOption, TopPOption, grouped
from forerun.files import write_text
from forerun.methods import METHODS, Method, is_method
from forerun.zoo import EMBEDDED

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BATCHING = "hf-batch"
STATIC = "static"
STATIC_ROWS = 16  # requests of a static batch
PAGE = 32  # tokens of a page of transformers' cache
CHUNK = 512  # tokens of one forward of transformers, at most
BATCHING_ROWS = 64  # requests for which transformers' cache has room, at least
POLL_SECONDS = 1.0
WARM_ROWS = 8  # requests at once in the warm-up of an open loop

Outputs = dict[str, list[list[Served]]]  # by method, then round by round


class BatchingServer:
    """Transformers' own continuous batching.

    It decodes in a thread and notes when each token was there. Its cache holds `rows` requests of
    `length` tokens; prefixes are not shared, as ours are not in a bench. Samples follow from the
    seed and from the times of arrival, because all rows draw from one source.
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
        # It warns that psutil is missing. Failures come back with the results.
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
        model: Any = peers.target
        self.manager = model.init_continuous_batching(config, sizes)
        if peers.params.seed is not None:
            torch.manual_seed(peers.params.seed)
        self.manager.start()

    def add(self, job: Job) -> int:
        name = self.manager.add_request(
            list(job.prompt), max_new_tokens=job.new_tokens, record_timestamps=True
        )
        return _key(name)

    def step(self, timeout: float | None) -> list[Event]:
        wait = POLL_SECONDS if timeout is None else min(timeout, POLL_SECONDS)
        result = self.manager.get_result(timeout=wait)
        if result is None:
            if not self.manager.is_running():
                raise RuntimeError(
                    "transformers' continuous batching stopped: "
                    f"{self.manager.background_thread_status}"
                )
            return []
        if result.error is not None:
            raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
        key = _key(result.request_id)
        events = [Event(key, result.lifespan[0])]
        for token, at in zip(result.generated_tokens, result.timestamps, strict=True):
            events.append(Event(key, at, [token], len(events) == len(result.generated_tokens)))
        return events

    def close(self) -> None:
        """End the thread."""
        self.manager.stop(block=True)


def _key(request_id: str) -> int:
    return int(request_id.removeprefix("req_"))


def static(name: str, ours: Callable[[str], Method]) -> Method | None:
    """Return the method that is served in static batches by this name."""
    method = "ar" if name == STATIC else name.removeprefix(f"{STATIC}/")
    if method == name or not is_method(method):
        names = ", ".join((*METHODS, STATIC, f"{STATIC}/METHOD", BATCHING))
        raise ValueError(f"unknown method {name!r}; there are {names}")
    return ours(method)


@dataclass(frozen=True)
class LoadTest:
    """What is measured.

    Attributes:
        plan: the methods and models.
        loads: how requests come.
        requests: requests of each load.
        lengths: least and most new tokens of a request.
        batching: whether transformers' continuous batching runs too.
    """

    plan: Plan
    loads: Sequence[Load]
    requests: int
    lengths: tuple[int, int]
    batching: bool

    @property
    def names(self) -> list[str]:
        """Return the names of all that is measured."""
        return [*self.plan.methods, *([BATCHING] if self.batching else [])]


class Servers:
    """Makes the servers of a test, each anew for each load."""

    def __init__(self, test: LoadTest, decoders: dict[str, Decoder], longest: int) -> None:
        self.test = test
        self.decoders = decoders
        self.longest = longest  # prompt and output of a request, in tokens
        self.peers = load_peers(test.plan, assisted=False) if test.batching else None

    @contextmanager
    def open(self, name: str) -> Iterator[Server]:
        """Yield the server of that name."""
        plan = self.test.plan
        if name != BATCHING:
            batch = STATIC_ROWS if name.startswith(STATIC) else None
            yield EngineServer(self.decoders[name], plan.params(), batch)
            return
        assert self.peers is not None
        server = BatchingServer(self.peers, max(BATCHING_ROWS, plan.batch), self.longest)
        try:
            yield server
        finally:
            server.close()


def serve(
    test: LoadTest,
    files: dict[str, list[Prompt]],
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure all loads and return the results; with `out` they are also written as files.

    Raises:
        ValueError: as `forerun.bench.measure.bench` does, and if there are fewer prompts than
            requests: methods would find the answer of a prompt that comes again among their
            phrases.
    """
    plan = test.plan
    datasets, tokenizer = load_prompts(plan, files)
    prompts = [prompt.tokens or () for rows in datasets.values() for prompt in rows]
    if len(prompts) < test.requests:
        raise ValueError(
            f"--requests {test.requests} are more than the {len(prompts)} prompts, which come once "
            "each"
        )
    decoders, _ = load_decoders(plan, tokenizer)
    servers = Servers(test, decoders, max(map(len, prompts)) + test.lengths[1])
    _warm_up(test, servers, prompts)
    outputs = _measure(test, servers, prompts, say)
    arguments = plan.arguments() | {"requests": test.requests, "new_tokens": list(test.lengths)}
    results = _results(test, outputs) | {
        "prompts": facts_of_prompts(datasets),
        **provenance(arguments),
    }
    if out is not None:
        _write(results, outputs, out)
    return results


def _warm_up(test: LoadTest, servers: Servers, prompts: Sequence[Sequence[int]]) -> None:
    """Let every method answer short requests, as many at once as later."""
    clients = max((load.clients or WARM_ROWS for load in test.loads), default=WARM_ROWS)
    rows = min(test.requests, clients)
    lengths = (1, min(WARM_UP, test.lengths[1]))
    for name in test.names:
        with servers.open(name) as server:
            jobs = jobs_of(Load(clients=rows), prompts, rows, lengths, test.plan.seed)
            drive(server, jobs, rows)


def _measure(
    test: LoadTest,
    servers: Servers,
    prompts: Sequence[Sequence[int]],
    say: Callable[[str], None],
) -> dict[Load, Outputs]:
    """Return what became of all requests, by load."""
    plan = test.plan
    outputs: dict[Load, Outputs] = {}
    for load in test.loads:
        outputs[load] = {name: [] for name in test.names}
    for number in range(plan.rounds):
        seed = plan.seed + 1000 * number
        for index, load in enumerate(test.loads):
            jobs = jobs_of(load, prompts, test.requests, test.lengths, seed)
            for name in turned(test.names, number, index):
                with servers.open(name) as server:
                    outputs[load][name].append(drive(server, jobs, load.clients))
                say(f"round {number + 1} of {plan.rounds}, {load.kind} {load.size}: {name}")
    return outputs


def _write(results: dict[str, Any], outputs: dict[Load, Outputs], out: Path) -> None:
    """Write records, results, report and pictures."""
    records = []
    for load, by_method in outputs.items():
        last_rounds = {name: rounds[-1] for name, rounds in by_method.items()}
        plot_rows(last_rounds, out / picture(load))
        for name, rounds in by_method.items():
            for number, served in enumerate(rounds):
                record = {load.kind: load.size, "method": name, "round": number}
                records.append(record | {"requests": [asdict(request) for request in served]})
    lines = [f"{json.dumps(record)}\n" for record in records]
    write_text(out / "records.jsonl", "".join(lines))
    write_text(out / "results.json", json.dumps(results, indent=1) + "\n")
    write_text(out / "report.md", markdown(results, [picture(load) for load in outputs]))


def _results(test: LoadTest, outputs: dict[Load, Outputs]) -> dict[str, Any]:
    """Return {kind: {size: figures}} of our first method, and of all "methods"."""
    plan = test.plan
    methods: dict[str, dict[str, Any]] = {name: {} for name in test.names}
    for load, by_method in outputs.items():
        for name in by_method:
            row = _compared(name, by_method, greedy=not plan.temperature)
            methods[name].setdefault(load.kind, {})[load.size] = row
    drafting = [name for name in plan.methods if name != "ar" and not name.startswith(STATIC)]
    chief = drafting[0] if drafting else "ar"
    first: dict[str, Any] = {}
    for kind, sizes in methods[chief].items():
        first[kind] = {size: {"method": chief} | row for size, row in sizes.items()}
    return first | {"methods": methods}


def _compared(name: str, outputs: Outputs, greedy: bool) -> dict[str, Any]:
    """Return a method's figures under one load, and how it compares.

    They have its tokens/s over each other method's, and the share of its greedy outputs that are
    those of `ar`.
    """
    rounds = [figures(served) for served in outputs[name]]
    over = {}
    for other, other_rounds in outputs.items():
        pairs = zip(rounds, map(figures, other_rounds), strict=True)
        over[other] = round(median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs), 4)
    row: dict[str, Any] = medians(rounds) | {"over": over}
    if greedy:
        equal = []
        for served, plain in zip(outputs[name], outputs["ar"], strict=True):
            equal += [a.tokens == b.tokens for a, b in zip(served, plain, strict=True)]
        row["exact_match"] = round(sum(equal) / len(equal), 4)
    return row


# Titles and figures of the tables. A space keeps two titles apart that read alike.
LOAD_COLUMNS = {
    "tokens/s": "tokens_per_s",
    "first token, ms, p50": "ttft_ms_p50",
    "p99": "ttft_ms_p99",
    "token, ms, p50": "tpot_ms_p50",
    "p99 ": "tpot_ms_p99",
    "longest gap, ms": "gap_ms_max",
}


def tables(results: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Return title and rows of a table for each load, the header first."""
    header = ["method", *map(str.strip, LOAD_COLUMNS), "over ar", "same tokens"]
    titled = []
    for kind, unit in (("clients", "clients"), ("rate", "requests a second")):
        for size in results.get(kind, {}):
            rows = [header]
            for name, method in results["methods"].items():
                rows.append(_cells(name, method[kind][size]))
            titled.append((f"{size} {unit}", rows))
    return titled


def _cells(name: str, row: dict[str, Any]) -> list[str]:
    same = f"{100 * row['exact_match']:.4g} %" if "exact_match" in row else ""
    values = [f"{row[key]:.1f}" for key in LOAD_COLUMNS.values()]
    return [name, *values, f"{row['over']['ar']:.2f}", same]


def markdown(results: dict[str, Any], pictures: list[str]) -> str:
    """Return the text of report.md."""
    arguments = results["arguments"]
    versions = results["versions"]
    lines = [
        f"# {arguments['target']} under load",
        "",
        f"{results['date']}, {versions['gpu'] or versions['cpu']}, {versions['threads']} threads, "
        f"torch {versions['torch']}, transformers {versions['transformers']}, forerun at "
        f"{versions['commit']}.",
        "",
    ]
    for title, (header, *rows) in tables(results):
        lines += [f"## {title}", "", "| " + " | ".join(header) + " |"]
        lines.append("|---" + "|---:" * (len(header) - 1) + "|")
        lines += [*("| " + " | ".join(row) + " |" for row in rows), ""]
    least, most = arguments["new_tokens"]
    lines += [
        "## How to read it",
        "",
        f"- Each load has {arguments['requests']} requests of {least} to {most} new tokens. "
        "Figures are medians over rounds; percentiles are over the requests of a round. Methods "
        "take turns on the same requests.",
        "- A closed loop keeps that many requests open. In an open loop they come by a clock "
        "(Poisson), and the time to the first token counts from when a request was due.",
        "- gap: the time between two steps that brought a request's tokens. `static` starts a "
        f"batch of {STATIC_ROWS} when the one before has ended. `hf-batch` is transformers' "
        "continuous batching, plain decoding.",
        "",
        *(f"![{name}]({name})" for name in pictures),
    ]
    return "\n".join(lines).rstrip() + "\n"


def picture(load: Load) -> str:
    """Return the file name of a load's picture."""
    return f"rows-{load.kind}-{load.size}.png"


def plot_rows(methods: dict[str, list[Served]], path: Path) -> None:
    """Draw how many requests of a load are open, and how many have their first token."""
    figure, axes = plt.subplots(
        len(methods), figsize=(8, 1.6 * len(methods) + 0.6), sharex=True, squeeze=False
    )
    for (name, served), panel in zip(methods.items(), axes[:, 0], strict=True):
        for label, colour, first in (
            ("open", "#adb5bd", lambda request: request.due),
            ("decoding", "#264653", lambda request: request.times[0]),
        ):
            panel.step(*rows_over_time(served, first), where="post", color=colour, label=label)
        panel.set(ylim=(0, None))
        panel.set_title(name, loc="left", fontsize="small")
    axes[0, 0].legend(fontsize=8)
    axes[-1, 0].set_xlabel("seconds")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


@dataclass(frozen=True)
class TrafficOptions:
    """How requests come, and how many."""

    clients: Annotated[
        list[str] | None, typer.Option(help="So many requests are always open, as in 1,4,16.")
    ] = None
    rate: Annotated[
        list[str] | None, typer.Option(help="Requests a second, Poisson arrivals, as in 2,4.")
    ] = None
    requests: Annotated[int, typer.Option(min=1, help="Requests of each load.")] = 64
    new_tokens: Annotated[str, typer.Option(help="Least and most new tokens of a request.")] = (
        "16:256"
    )

    def loads(self) -> list[Load]:
        """Return the loads. Raises ValueError if there are none."""
        loads = [Load(clients=int(number)) for number in numbers("--clients", self.clients)]
        loads += [Load(rate=number) for number in numbers("--rate", self.rate)]
        if not loads:
            raise ValueError("give --clients or --rate: how requests come")
        return loads

    def lengths(self) -> tuple[int, int]:
        """Return the least and most new tokens. Raises ValueError."""
        low, _, high = self.new_tokens.partition(":")
        if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
            raise ValueError(
                f"--new-tokens must be MIN:MAX with 1 <= MIN <= MAX, not {self.new_tokens!r}"
            )
        return int(low), int(high)


@dataclass(frozen=True)
class MethodOptions:
    """The target, the methods and their trained parts."""

    target: Annotated[str, typer.Option(help="Hub id, folder or GGUF file.")] = EMBEDDED
    methods: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join((*METHODS, STATIC, BATCHING))}.")
    ] = None
    method_arg: Annotated[list[str] | None, typer.Option(help="As in sd.gamma=6; repeatable.")] = (
        None
    )
    head: Annotated[list[str] | None, typer.Option(help="Folder of a head of the target's.")] = None
    pre_verifier: Annotated[Path | None, typer.Option(help="Folder of the trained layer.")] = None
    guard: Annotated[
        bool, typer.Option("--guard", help="Leave drafts out while they do not pay.")
    ] = False


@dataclass(frozen=True)
class PromptOptions:
    """The prompts, and how tokens are chosen."""

    dataset: Annotated[list[str] | None, typer.Option(help="As of `forerun bench`.")] = None
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first prompts of each dataset.")
    ] = None
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are messages.")] = False
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Length of the standard library's prompts.")
    ] = 128
    stop_at_eos: Annotated[bool, typer.Option("--stop-at-eos", help="End at the end token.")] = (
        False
    )
    temperature: TemperatureOption = 0.0
    top_p: TopPOption = 1.0
    seed: Annotated[int, typer.Option(min=0)] = 0


@grouped
def main(
    *,
    traffic: TrafficOptions,
    methods: MethodOptions,
    prompts: PromptOptions,
    loading: LoadOptions,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 2,
    out: Annotated[
        Path | None, typer.Option(help="Folder for records, results, report and pictures.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure methods under load, in turns on the same requests, in one process.

    Lists may be given with commas.
    """
    loads = traffic.loads()
    lengths = traffic.lengths()
    names = split(methods.methods)
    given = vars(traffic) | vars(methods) | vars(prompts) | vars(loading)
    given |= {"rounds": rounds, "tune": None}
    given["methods"] = [name for name in names if name != BATCHING]
    batch = max(load.clients or 1 for load in loads)
    plan, files = planned(given, static, max_new_tokens=lengths[1], batch=batch)
    if out is not None:
        if (out / "records.jsonl").exists():
            raise ValueError(f"{out} holds a run already: give another --out")
        out.mkdir(parents=True, exist_ok=True)
    test = LoadTest(plan, loads, traffic.requests, lengths, BATCHING in names)
    results = serve(test, files, out, progress)
    progress("")
    if as_json:
        print(json.dumps(results))
        return
    for title, rows in tables(results):
        print(title)
        for row in rows:
            print("  ".join(f"{cell:>14}" for cell in row))


def numbers(option: str, values: list[str] | None) -> list[float]:
    """Return the numbers of an option.

    Raises:
        ValueError: one is no number, or not above 0, or a number of clients that is not whole.
    """
    try:
        parts = [float(part) for part in split(values)]
    except ValueError as error:
        raise ValueError(f"{option} takes numbers: {error}") from None
    if option == "--clients":
        if any(part < 1 or part != int(part) for part in parts):
            raise ValueError(f"{option} must be whole numbers of at least 1")
    elif any(part <= 0 for part in parts):
        raise ValueError(f"{option} must be above 0")
    return parts


if __name__ == "__main__":
    run(main)
