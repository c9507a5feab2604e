"""A fleet that is only reckoned: by hand, by queueing theory, and alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.bench.arrivals import Arrival, read_trace
from forerun.bench.fleet import alone, cheapest, fewest, fleet, percentile, plan
from forerun.bench.replica import CHUNK_SECONDS, CHUNKS, Engines, Replica
from forerun.cli import main
from forerun.costs import Costs

FLAT = Costs({1: 10.0}, {})  # any forward takes 10 ms
STEEP = Costs({1: 10.0, 2: 12.0, 4: 16.0}, {1: 1.0})  # 8 ms and 2 for each token


def ran(trace: list[Arrival], engines: Engines) -> list[tuple[float, float]]:
    """When the first and the last token of each request came, in ms, on one replica; in the order of their ends."""
    replica = Replica(engines)
    for arrival in trace:
        replica.run(arrival.seconds)
        replica.add(arrival)
    replica.run(inf)
    return [(round(1000 * (seq.first or 0), 6), round(1000 * seq.last, 6)) for seq in replica.done]


def test_a_queue_by_hand() -> None:
    """Prompts of 2 tokens: one forward of 10 ms reads what is before their last token; then steps of 10 ms."""
    two = [Arrival(0.0, 2, 3), Arrival(0.005, 2, 2)]
    # One row: the second is read at 40 ms, when the first has ended.
    assert ran(two, Engines(FLAT, rows=1)) == [(20.0, 40.0), (60.0, 70.0)]
    # Two rows: it came while the first was read, and joins behind the step that ends at 20 ms.
    assert ran(two, Engines(FLAT, rows=2)) == [(20.0, 50.0), (40.0, 50.0)]
    # A step of two rows takes 12 ms.
    assert ran(two, Engines(STEEP, rows=2)) == [(20.0, 54.0), (42.0, 54.0)]
    # Keys and values for one of them at a time.
    assert ran(two, Engines(FLAT, rows=2, kv=9)) == [(20.0, 40.0), (60.0, 70.0)]
    assert ran(two, Engines(FLAT, rows=2, kv=10)) == [(20.0, 50.0), (40.0, 50.0)]
    # A prompt of one token needs no reading.
    assert ran([Arrival(1.0, 1, 1)], Engines(FLAT, rows=1)) == [(1010.0, 1010.0)]


def test_drafts_by_hand() -> None:
    """Four tokens under the target's eyes and three forwards of the draft: 16 + 3 ms for 2.5 tokens."""
    engines = Engines(STEEP, rows=1, gamma=3, tau=2.5, step_ms=1.0)
    assert engines.step(1) == pytest.approx(0.020)
    # 11 ms for the prompt's token by both models, then two steps.
    assert ran([Arrival(0.0, 2, 5)], engines) == [(31.0, 51.0)]
    assert ran([Arrival(0.0, 2, 5, tau=4.0)], engines) == [(31.0, 51.0)]
    assert ran([Arrival(0.0, 2, 4, tau=4.0)], engines) == [(31.0, 31.0)]
    head = Costs({1: 10.0}, {}, head={1: 2.0})
    assert Engines(head, rows=1, gamma=2, tau=2).step(1) == pytest.approx(0.014)


def test_prompts_are_read_in_chunks_between_steps() -> None:
    """A long prompt holds up the row that runs by no more than about CHUNK_SECONDS a step."""
    costs = Costs({1: 10.0, 1001: 1010.0}, {})  # a ms a token
    engines = Engines(costs, rows=2)
    assert engines.chunk == 64 and Engines(FLAT, 1).chunk == CHUNKS[1]
    (long, short) = Arrival(0.0101, 1025, 2), Arrival(0.0, 1, 40)
    done = ran([short, long], engines)
    # 16 chunks of 73 ms, each with a step of 10 ms behind it: two would take longer than CHUNK_SECONDS.
    assert 2 * engines.read(64) > CHUNK_SECONDS
    assert done[0][0] == pytest.approx(20 + 16 * (73 + 10) + 11, abs=1e-6)
    assert done[1][1] > done[0][1]


def test_one_row_is_the_queue_that_theory_knows() -> None:
    """M/D/1: the mean time in the queue is rho S / 2 (1 - rho)."""
    service, rate, random, at = 0.05, 12.0, Random(0), 0.0
    trace = []
    for _ in range(20000):
        at += random.expovariate(rate)
        trace.append(Arrival(at, 1, 5))
    done = ran(trace, Engines(FLAT, rows=1))
    mean = sum(last / 1000 - arrival.seconds for arrival, (_, last) in zip(trace, done, strict=True)) / len(trace)
    rho = rate * service
    # It begins at once where nothing runs.
    assert mean - service == pytest.approx(rho * service / (2 * (1 - rho)), rel=0.1)


arrivals = st.builds(Arrival, st.floats(0, 2), st.integers(1, 300), st.integers(1, 20))
traces = st.lists(arrivals, min_size=1, max_size=12).map(lambda found: sorted(found, key=lambda each: each.seconds))


@settings(max_examples=60, deadline=None)
@given(traces, st.integers(1, 4), st.integers(1, 12), st.sampled_from([1, 2, 8]))
def test_who_is_alone_waits_least(trace: list[Arrival], rows: int, replicas: int, kv_times: int) -> None:
    kv = kv_times * max(each.prompt + each.output for each in trace)
    engines = Engines(STEEP, rows, kv=kv)
    few, many = fleet(trace, engines, replicas), fleet(trace, engines, len(trace))
    assert alone(trace, engines) == many
    for one, other in zip((*many.first_ms, *many.token_ms), (*few.first_ms, *few.token_ms), strict=True):
        assert one <= other + 1e-3
    assert few.kv <= kv and few.rows <= rows and 0 < few.busy <= 1 and many.rows == 1
    again = fleet(trace, engines, replicas)
    assert again == few


@settings(max_examples=40, deadline=None)
@given(traces, st.integers(1, 4), st.floats(1, 400))
def test_steps_taken_at_once_are_steps_one_by_one(trace: list[Arrival], rows: int, every: float) -> None:
    """A replica that is asked to stop now and then does what it would do anyway."""
    engines = Engines(STEEP, rows, gamma=2, tau=1.5)
    replica = Replica(engines)
    for arrival in trace:
        while replica.now < arrival.seconds and replica.in_flight(replica.now):
            replica.run(min(arrival.seconds, replica.now + every / 1000))
        replica.add(arrival)
    while replica.waiting or replica.running or replica.reading is not None:
        replica.run(replica.now + every / 1000)
    stopped = [(round(1000 * (seq.first or 0), 3), round(1000 * seq.last, 3)) for seq in replica.done]
    assert stopped == [(round(a, 3), round(b, 3)) for a, b in ran(trace, engines)]


def test_the_fewest_replicas_for_a_target() -> None:
    """Eight requests at once of 100 ms each, one row: the last of k a replica begins behind k - 1 others."""
    trace = [Arrival(0.0, 1, 10)] * 8
    engines = Engines(FLAT, rows=1)
    for replicas, first in ((1, 710.0), (2, 310.0), (3, 210.0), (4, 110.0), (8, 10.0)):
        found = fleet(trace, engines, replicas)
        assert found.first_ms[1] == first and found.token_ms == (10.0, 10.0)
    for target, replicas in ((710, 1), (300, 3), (110, 4), (100, 8), (10, 8)):
        best = fewest(trace, engines, target, 10)
        assert best is not None and best.replicas == replicas
    assert fewest(trace, engines, 9, 100) is None and fewest(trace, engines, 1000, 9) is None
    with pytest.MonkeyPatch.context() as patch:  # what nobody can keep is not looked for
        patch.setattr("forerun.bench.fleet.fleet", None)
        assert fewest(trace, engines, 9, 100) is None
    found = plan(trace, [engines, replace(engines, rows=8)], 15, 20)
    best_engines, best = cheapest(found) or (engines, None)
    assert best is not None and best_engines.rows == 8 and best.replicas == 1 and best.kv == 8 * 11
    assert cheapest([(engines, None)]) is None


@pytest.mark.parametrize("table", [{}, {1: 0.0}, {1: 5.0, 8: 0.0}])
def test_forwards_take_time(table: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="must be above 0 ms"):
        Engines(Costs(table, {}), rows=1)


def test_percentiles() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0 and percentile([float(n) for n in range(1, 101)], 99) == 99.0


def test_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"seconds": 7, "prompt_tokens": 5, "output_tokens": 6}\n\n'
        '{"seconds": 3.5, "prompt_tokens": 1, "output_tokens": 2, "tau": 1.5}\n'
    )
    assert read_trace(path) == [Arrival(0.0, 1, 2, 1.5), Arrival(3.5, 5, 6)]
    assert read_trace(path, load=7)[1].seconds == 0.5
    line = {"time": "2026-11-22 20:00:01,500", "level": "INFO"}
    asked = {"prompt": 9, "tokens": 4, "tau": 2.0, "queue_ms": 1.0, "first_ms": 20.0}
    log = [line | {"message": "http://127.0.0.1:8000"}, line | asked | {"total_ms": 1500.0, "reason": "stop"}]
    log += [line | asked | {"total_ms": 500.0, "tokens": 0, "reason": "abort"}, line | asked | {"total_ms": 1000.0}]
    path.write_text("".join(json.dumps(each) + "\n" for each in log))
    assert read_trace(path) == [Arrival(0.0, 9, 4, 2.0), Arrival(0.5, 9, 4, 2.0)]
    # Two prompts with two answers each, of which one is empty; and what other programs say.
    several = line | asked | {"total_ms": 1500.0, "n": 2, "choices": 4, "prompt": 18, "tokens": 3}
    path.write_text(f'Loading weights\n[1]\n{{"time": \n{{"a": 1}}\n{json.dumps(several)}\n')
    assert read_trace(path) == [Arrival(0.0, 9, 1, 2.0)] * 3
    good = '{"seconds": 0, "prompt_tokens": 1, "output_tokens": 1}\n'
    for text, message in {
        "": "holds no arrivals",
        good + "{": "line 2 is no arrival",
        good + "[]": "line 2 is no arrival: it is no JSON object",
        json.dumps(line) + "\nLoading weights": "holds no arrivals",
        json.dumps(several | {"choices": 0}): "choices must be an integer of at least 1, not 0",
        json.dumps(several | {"time": "noon"}): "line 1 is no arrival: time data 'noon'",
        '{"seconds": 0, "prompt_tokens": 1}': "line 1 is no arrival: it has no 'output_tokens'",
        good.replace("1", "0", 1): "the tokens of the prompt must be an integer of at least 1, not 0",
        good.replace('"seconds": 0', '"seconds": "x"'): "seconds must be a number, not 'x'",
        good.replace("}", ', "tau": 0.5}'): "tau must be a number of at least 1, not 0.5",
    }.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_trace(path)
    with pytest.raises(ValueError, match=r"cannot read the trace .*none\.jsonl"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="load must be above 0"):
        read_trace(path, 0.0)


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    """`forerun simulate` in this process: what it says, and its mistake."""

    def called(*arguments: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["forerun", "simulate", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        found = capsys.readouterr()
        assert ended.value.code == (2 if found.err else 0)
        return found.out, found.err

    return called


def test_the_command(tmp_path: Path, simulate: Callable[..., tuple[str, str]]) -> None:
    trace, costs = tmp_path / "trace.jsonl", tmp_path / "costs.json"
    line = '{"seconds": 0, "prompt_tokens": 1, "output_tokens": 10}\n'
    trace.write_text(8 * line)
    costs.write_text('{"target": {"1": 10}}')
    asked = ["--fleet", str(trace), "--costs", str(costs)]
    found = json.loads(simulate(*asked, "--first-ms", "300", "--rows", "1", "--json")[0])
    assert found["requests"] == 8 and found["best"]["fleet"]["replicas"] == 3 and found["best"]["fleet"]["kv"] == 11
    shown = simulate(*asked, "--first-ms", "300", "--token-ms", "10")[0]
    assert shown.count("\n") > 8 and "1 replicas of 4 rows, 44 positions of KV each, keep 99 %" in shown
    assert "no number of replicas keeps" in simulate(*asked, "--token-ms", "9")[0]
    assert json.loads(simulate(*asked, "--replicas", "2", "--rows", "1", "--json")[0])["plans"][0]["fleet"][
        "first_ms"
    ] == [110.0, 310.0]
    for more, message in (
        ((), "give a run's folder or --fleet TRACE"),
        (("--fleet", str(trace)), "--fleet needs --costs"),
        ((*asked, "--kv", "10"), "a request of 1 + 10 tokens does not fit kv 10"),
        ((*asked, "--replicas", "0"), "replicas must be at least 1, not 0"),
        ((*asked, "--rows", "0"), "rows must be at least 1, not 0"),
        ((*asked, "--tau", "2"), "tau must be from 1 to gamma + 1 = 1"),
        ((*asked, "--first-ms", "0"), "first_ms must be above 0"),
        ((*asked, "--load", "-1"), "load must be above 0"),
        ((*asked, "--learn", str(tmp_path)), "--learn is for a run"),
        (("--fleet", str(costs), "--costs", str(costs)), "line 1 is no arrival: it has no 'seconds'"),
    ):
        told = simulate(*more)[1]
        assert message in told and told.count("\n") == 1
    trace.write_text(line.replace("}", ', "tau": 2.5}'))
    assert "more than gamma + 1 = 1: give gamma" in simulate(*asked)[1]
    assert "replicas of" in simulate(*asked, "--gamma", "2")[0]


def test_no_torch_is_needed() -> None:
    code = "import sys, forerun.bench.fleet, forerun.cli.fleet; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
