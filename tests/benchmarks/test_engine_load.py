"""Loads: closed and open ones, servers under them, and `engine_load` as a command."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path

import pytest

from benchmarks.peers.hf import Generate
from benchmarks.serving.engine_load import BatchingServer, static
from benchmarks.serving.traffic import (
    EngineServer,
    Event,
    Job,
    Load,
    Served,
    drive,
    figures,
    jobs_of,
    medians,
    rows_over_time,
)
from forerun.api.load import Decoder
from forerun.bench.plan import parse_methods
from forerun.methods import AR, SD
from forerun.sampling.params import SamplingParams
from tests.support import commands
from tests.support.toys import noisy_copy, tiny

PARAMS = SamplingParams(ignore_eos=True)
PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11], [12]]


class Clockwork:
    """A server of `rows` rows, and its clock.

    Each step takes 1 s and adds a token to each row.
    """

    def __init__(self, rows: int = 1000) -> None:
        self.now, self.rows = 100.0, rows
        self.open: dict[int, list[int]] = {}
        self.keys = count()
        self.most: list[int] = []
        self.timeouts: list[float | None] = []

    def add(self, job: Job) -> int:
        key = next(self.keys)
        self.open[key] = list(range(job.new_tokens))
        return key

    def step(self, timeout: float | None) -> list[Event]:
        self.most.append(len(self.open))
        self.timeouts.append(timeout)
        self.now += 1
        events = []
        for key in list(self.open)[: self.rows]:
            tokens = self.open[key]
            events.append(Event(key, self.now, [tokens.pop(0)], not tokens))
            if not tokens:
                del self.open[key]
        return events

    def drive(self, jobs: Sequence[Job], clients: int | None = None) -> list[Served]:
        def sleep(seconds: float) -> None:
            self.now += seconds

        return drive(self, jobs, clients, lambda: self.now, sleep)


def jobs(*lengths: int, dues: Sequence[float] = ()) -> list[Job]:
    return [Job((1, 2), length, dues[at] if dues else 0.0, at) for at, length in enumerate(lengths)]


def test_a_closed_loop_keeps_its_requests_open() -> None:
    server = Clockwork()
    served = server.drive(jobs(3, 1, 4, 1, 5, 2), 3)
    assert server.most[:4] == [3] * 4  # until there are no more
    assert all(timeout is None for timeout in server.timeouts)
    assert [one.tokens for one in served] == [list(range(n)) for n in (3, 1, 4, 1, 5, 2)]
    assert [one.due for one in served] == [0, 0, 0, 1, 2, 3]  # each comes when another has ended
    assert [one.times for one in served][3:] == [[2], [3, 4, 5, 6, 7], [4, 5]]


def test_an_open_loop_goes_by_the_clock() -> None:
    server = Clockwork(rows=1)
    served = server.drive(jobs(2, 1, 1, dues=[0.0, 0.5, 30.0]))
    assert [one.due for one in served] == [
        0.0,
        0.5,
        30.0,
    ]  # and not when the server had time for it
    assert [one.times for one in served] == [[1, 2], [3], [31]]
    assert server.most == [1, 2, 1, 1] and server.timeouts == [0.5, 29.0, 28.0, None]
    row = figures(served)
    assert (row["ttft_ms_p50"], row["ttft_ms_max"]) == (1000.0, 2500.0)
    assert row["tokens"] == 4 and row["tokens_per_s"] == pytest.approx(4 / 31, abs=1e-3)
    assert row["tpot_ms_p50"] == row["gap_ms_max"] == 1000.0


def test_arrivals_and_lengths_follow_from_the_seed() -> None:
    load = Load(rate=4.0)
    many = jobs_of(load, PROMPTS, 2000, (16, 256), 5)
    assert (
        many
        == jobs_of(load, PROMPTS, 2000, (16, 256), 5)
        != jobs_of(load, PROMPTS, 2000, (16, 256), 6)
    )
    assert len(many) == 2000 and many[0].due == 0 and many == sorted(many, key=lambda job: job.due)
    gaps = sorted(late.due - soon.due for soon, late in pairwise(many))
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 4, rel=0.1)
    assert gaps[len(gaps) // 2] == pytest.approx(0.693 / 4, rel=0.15)  # exponential, not even
    lengths = [job.new_tokens for job in many]
    assert (min(lengths), max(lengths)) == (16, 256) and len({job.seed for job in many}) == 2000
    closed = jobs_of(Load(clients=3), PROMPTS, 2000, (16, 256), 5)
    assert [job.new_tokens for job in closed] == lengths and not any(job.due for job in closed)
    assert [list(job.prompt) for job in closed[:5]] == [*PROMPTS, PROMPTS[0]]


def test_figures_are_of_requests_and_of_rounds() -> None:
    fast = Served(0.0, 0.5, [1, 2, 3], [1.0, 1.0, 2.0])  # two tokens of one step
    slow = Served(1.0, 3.0, [4], [4.0])
    row = figures([fast, slow])
    assert (row["tokens_per_s"], row["seconds"]) == (1.0, 4.0)
    assert (row["ttft_ms_p50"], row["ttft_ms_max"]) == (2000.0, 3000.0)
    assert (
        row["tpot_ms_p50"] == 500.0 and row["gap_ms_max"] == 1000.0
    )  # the other has no second token
    assert row["wait_ms_max"] == 2000.0
    assert (
        medians([row, row | {"tokens_per_s": 3.0}, row | {"tokens_per_s": 9.0}])["tokens_per_s"]
        == 3.0
    )
    assert rows_over_time([fast, slow], lambda one: one.due) == ([0.0, 1.0, 2.0, 4.0], [1, 2, 1, 0])


def reference(asked: Sequence[Job]) -> list[list[int]]:
    decoder = Decoder(tiny("llama"), method=AR())
    return [
        decoder.generate(list(job.prompt), PARAMS, max_new_tokens=job.new_tokens).tokens
        for job in asked
    ]


def test_an_engine_serves_what_its_method_generates() -> None:
    target = tiny("llama")
    decoder = Decoder(
        target, draft=noisy_copy(target, 0.02), method=SD(2), guard=False, prefix_bytes=0
    )
    asked = jobs_of(Load(clients=2), PROMPTS, 4, (3, 9), 1)
    wanted = reference(asked)
    for clients in (2, 4):
        served = drive(EngineServer(decoder, PARAMS), asked, clients)
        assert [one.tokens for one in served] == wanted
        for one in served:
            assert one.begun is not None and one.due <= one.begun < one.times[0] <= one.times[-1]
    assert not decoder.engine.busy


def test_static_batches_begin_when_the_one_before_has_ended() -> None:
    decoder = Decoder(tiny("llama"), method=AR(), prefix_bytes=0)
    asked = [Job((3, 4, at), length, 0.0, 0) for at, length in enumerate((2, 9, 3, 5, 4))]
    server = EngineServer(decoder, PARAMS, batch=2)
    rows = []
    step = server.step

    def watched(timeout: float | None) -> list[Event]:
        events = step(timeout)
        rows.append({event.key for event in events if event.tokens})
        return events

    server.step = watched  # type: ignore[method-assign]
    served = drive(server, asked, 5)
    assert [one.tokens for one in served] == reference(asked)
    assert [each for each in rows if each] == [{0, 1}] * 2 + [{1}] * 7 + [{2, 3}] * 3 + [
        {3}
    ] * 2 + [{4}] * 4


def batched(
    asked: Sequence[Job], rows: int, clients: int, params: SamplingParams = PARAMS
) -> list[Served]:
    """What transformers' own continuous batching serves."""
    server = BatchingServer(Generate(tiny("llama"), None, params), rows, 16)
    try:
        return drive(server, asked, clients)
    finally:
        server.close()


@pytest.mark.slow
def test_transformers_own_continuous_batching_is_served_alike() -> None:
    asked = jobs_of(Load(clients=3), PROMPTS, 4, (3, 9), 1)
    served = batched(asked, 4, 3)
    assert [one.tokens for one in served] == reference(asked)
    for one, job in zip(served, asked, strict=True):
        assert (
            one.begun is not None and one.begun <= one.times[0] and len(one.times) == job.new_tokens
        )
        assert one.times == sorted(one.times)

    def outputs(seed: int, **options: float) -> list[list[int]]:
        params = replace(PARAMS, seed=seed, temperature=1.5, **options)
        return [one.tokens for one in batched(asked[:2], 2, 1, params)]

    first, again, other = (outputs(seed) for seed in (1, 1, 2))
    assert first == again != other
    assert outputs(1, top_p=1e-6) == reference(asked[:2])


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.run(
        *arguments, program="from benchmarks.serving.engine_load import main, run; run(main)"
    )


@pytest.mark.slow
def test_a_run_under_load(tmp_path: Path) -> None:
    assert parse_methods(["static", "static/sd"], ["sd.gamma=2"], None, {}, static)[
        "static/sd"
    ] == SD(2)
    out = tmp_path / "out"
    done = command(
        *(
            "--methods",
            "sd,static,static/sd,hf-batch",
            "--clients",
            "2,4",
            "--rate",
            "50",
            "--requests",
            "4",
        ),
        *(
            "--new-tokens",
            "3:8",
            "--rounds",
            "2",
            "--prompt-tokens",
            "12",
            "--threads",
            "1",
            "--json",
        ),
        *("--out", str(out), "--method-arg", "sd.gamma=3"),
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed == json.loads((out / "results.json").read_text())
    assert set(printed["clients"]) == {"2", "4"} and set(printed["rate"]) == {"50"}
    assert {"tokens_per_s", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99"} <= set(
        printed["clients"]["4"]
    )
    assert printed["clients"]["4"]["method"] == "sd"
    assert list(printed["methods"]) == ["ar", "sd", "static", "static/sd", "hf-batch"]
    for name, method in printed["methods"].items():
        assert set(method) == {"clients", "rate"}
        for each in [*method["clients"].values(), *method["rate"].values()]:
            assert each["exact_match"] == 1.0 and each["over"][name] == 1.0
    arguments = printed["arguments"]
    assert printed["versions"]["cpu"] and printed["date"].endswith(" UTC")
    assert arguments["methods"]["static/sd"] == {"gamma": 3} and arguments["requests"] == 4
    lines = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 5 * 2 and all(len(line["requests"]) == 4 for line in lines)
    page = (out / "report.md").read_text()
    assert "## 4 clients" in page and "static/sd" in page and "rows-rate-50.png" in page
    for name in ("clients-2", "clients-4", "rate-50"):
        assert (out / f"rows-{name}.png").stat().st_size > 1000
    again = command("--clients", "2", "--out", str(out))
    assert again.returncode == 2 and "holds a run already" in again.stderr


@pytest.mark.slow
def test_mistakes_are_one_line() -> None:
    for arguments, message in (
        (["--methods", "static/turbo", "--clients", "2"], "unknown method 'static/turbo'"),
        (
            ["--clients", "2", "--new-tokens", "9:8"],
            "--new-tokens must be MIN:MAX with 1 <= MIN <= MAX",
        ),
    ):
        done = command(*arguments)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, (
            done.stderr
        )
