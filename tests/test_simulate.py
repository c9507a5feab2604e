"""The simulator: prices come back from what was made with them, runs are repriced exactly, tables and mistakes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import commands
import pytest
from toys import noisy_copy, tiny, tiny_tokenizer

from forerun.bench.prices import Prices, fitted, kind
from forerun.bench.records import Record, Records
from forerun.bench.roofline import COUNTS, GPUS, read_costs, table
from forerun.bench.simulate import RecordedRun, check, repriced
from forerun.cli import main
from forerun.costs import Costs
from forerun.engine import Step
from forerun.methods import PacerLyanna, Suffix, method
from forerun.metrics import Stats, Times, Work, work

COSTS = Costs({1: 4.0, 8: 6.0, 64: 20.0}, {1: 0.5, 8: 1.0}, head={1: 0.25, 8: 0.5})


def steps(number: int, *each: tuple[int, int]) -> list[Step]:
    """Of one sequence, from the engine's step `number` on: (drafted, draft forwards) of each."""
    return [Step(0, number + at, 1, drafted=drafted, draft_forwards=n) for at, (drafted, n) in enumerate(each)]


def test_the_work_of_a_batch_is_that_of_its_widest_rows() -> None:
    long, short = steps(4, (3, 3), (0, 3), (5, 5), (5, 5)), steps(4, (1, 3), (2, 3))
    assert work([long, short]) == ((2, 1, 6, 5), (1, 2, 3, 3), (1, 2, 4, 3))
    assert work([long, short], pads=False) == ((2, 1, 6, 5), (1, 2, 2, 3), (1, 2, 3, 3))
    # A row that joins later shares the steps of its numbers.
    assert work([long, steps(7, (1, 5), (2, 2))]) == (
        (1, 1, 1, 3), (1, 1, 3, 2), (1, 1, 4, 3), (1, 1, 6, 5), (1, 2, 6, 5)
    )  # fmt: skip
    assert work([steps(0, *[(0, 0)] * 9)]) == ((9, 1, 1, 0),)


def record(method: str, batch: int, steps: Work, seconds: float, prefill: float = 0.01) -> Record:
    tokens = sum(count * rows for count, rows, _, _ in steps)
    stats = Stats(tokens, tokens, 0, 0, 0, 0, seconds + prefill, (), ())
    spent = Times(sum(count for count, *_ in steps), 0.0, 0.0, seconds, 0.0, 0.0)
    return Record(0, "d", batch, ["p"], method, stats, spent, steps, prefill, None, [])


def test_prices_come_back_from_what_they_made() -> None:
    prices = Prices(COSTS, 0.2, 0.7, {"sd": 0.1, "lyanna width=1": -0.05}, {"suffix": 0.3}, {})
    kinds = {"ar": "ar", "sd.gamma=2": "sd", "sd.gamma=6": "sd", "suffix": "suffix", "lyanna": "lyanna width=1"}
    shapes: dict[str, Work] = {
        "ar": ((40, 2, 1, 0),),
        "sd.gamma=2": ((20, 2, 3, 2), (1, 1, 2, 1)),
        "sd.gamma=6": ((12, 2, 7, 6),),
        "suffix": ((9, 2, 5, 0), (11, 2, 1, 0)),
        "lyanna": ((10, 2, 9, 8),),
    }
    records = []
    for name, steps in shapes.items():
        made = record(name, 0, steps, 0.0)
        records.append(record(name, 0, steps, prices.steps_ms(kinds[name], made) / 1000))
    found = fitted(COSTS, records, kinds)
    assert (found.step_ms, found.draft_ms) == pytest.approx((0.2, 0.7), abs=1e-3)
    assert found.token_ms == pytest.approx(prices.token_ms, abs=1e-3)
    assert found.own_ms == pytest.approx(prices.own_ms, abs=1e-3)
    assert found.start_ms == pytest.approx(dict.fromkeys(kinds.values(), 10.0))
    for before, after in zip(records, repriced(records, found, kinds), strict=True):
        assert after.stats.seconds == pytest.approx(before.stats.seconds, rel=1e-3)


def test_a_check_sees_what_the_prices_do_not_say() -> None:
    """Batches with an even number teach; those with an odd one are told."""
    prices = Prices(COSTS, 0.2, 0.7, {"sd": 0.1})
    methods = {"ar": method("ar"), "sd": method("sd")}
    shapes: dict[str, list[Work]] = {
        "ar": [((40, 1, 1, 0),), ((30, 1, 1, 0),), ((20, 1, 1, 0),)],
        "sd": [((9, 1, 6, 5), (1, 1, 1, 0)), ((8, 1, 6, 5), (2, 1, 3, 2)), ((5, 1, 4, 3),)],
    }

    def recorded(slower: float) -> RecordedRun:
        records = []
        for name, works in shapes.items():
            for batch, steps in enumerate(works):
                ms = prices.steps_ms(name, record(name, batch, steps, 0.0))
                times = slower if name == "sd" and batch == 1 else 1.0
                records.append(record(name, batch, steps, times * ms / 1000, prefill=0.0))
        return RecordedRun(methods, records, COSTS, None, 1, False)

    for slower in (1.0, 1.25):
        (found,) = check(recorded(slower))["datasets"].values()
        assert list(found) == ["ar", "sd"] and found["ar"]["error"] == 0
        assert found["sd"]["error"] == pytest.approx(slower - 1, abs=2e-3)
    with pytest.raises(ValueError, match="nothing is known of 'sd'"):
        check(recorded(1.0), replace(recorded(1.0), methods={"ar": method("ar")}))
    with pytest.raises(ValueError, match="went by h100"):
        check(replace(recorded(1.0), given="h100"))
    single = recorded(1.0)
    with pytest.raises(ValueError, match="nothing to check on"):
        check(replace(single, records=[each for each in single.records if not each.batch % 2]))


def test_no_step_is_cheaper_than_half_its_forwards() -> None:
    prices = Prices(COSTS, 0.5, -50.0, {"sd": -9.0})
    assert prices.shape("sd", 1, 8, 4) == (6.0 + 4 * 0.5) / 2 and prices.shape("sd", 1, 1, 0) == 4.5


def test_kinds_tell_apart_what_costs_otherwise() -> None:
    assert kind(method("pacer")) == "pacer" and kind(Suffix()) == "suffix width=1"
    assert kind(PacerLyanna(block=2)) == "pacer-lyanna block=2 width=1"
    assert kind(method("ouroboros", window=3)) == "ouroboros window=3"


def test_rooflines() -> None:
    gpu = GPUS["h100"]
    seven, one = table(gpu, 1, "llama-2-7b"), table(gpu, 1, "deepseek-coder-1.3b")
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    cached = 32 * 2 * 2 * 4096 * 1024
    assert seven[1] == pytest.approx((2 * weights + cached) / (0.85 * 3350e6), rel=1e-3)  # bound by memory
    assert seven[256] > 1.1 * seven[64] >= 1.1 * seven[1] > 4 * one[1]
    assert 4 < seven[1] / table(gpu, 8, "llama-2-7b")[1] < 8  # all-reduces
    halved = table(gpu, 1, "llama-3-70b")[1] / table(gpu, 1, "llama-3-70b-fp8")[1]
    assert 1.9 < halved <= 2
    assert list(seven) == list(COUNTS) and list(seven.values()) == sorted(seven.values())


def test_given_costs(tmp_path: Path) -> None:
    costs = read_costs("rtx4090x2:llama-3-8b:llama-68m")
    assert costs.target[1] > 10 * costs.draft[1] and costs.head[1] < costs.target[1] / 10
    assert read_costs("h200:llama-2-13b").draft == {}
    path = tmp_path / "costs.json"
    path.write_text('{"target": {"1": 5, "8": 7.5}, "policy": 0.1}')
    assert read_costs(str(path)) == Costs({1: 5.0, 8: 7.5}, {}, policy=0.1)
    for text, message in {
        "h100": "takes FILE.json or GPU",
        "h100:": "takes FILE.json or GPU",
        "v100:llama-2-7b": "the GPU must be one of a100, h100, h200, rtx4090",
        "h100x0:llama-2-7b": "or so many",
        "h100:gpt": "a shape must be one of .*llama-2-7b.*, not 'gpt'",
        "h100:llama-2-7b:gpt": "not 'gpt'",
        str(tmp_path / "none.json"): "none.json holds no table",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_costs(text)
    for text in (
        '{"target": {"1": 0}}',
        '{"target": {"1": Infinity}}',
        '{"target": {}}',
        '{"draft": {"1": 2}}',
        '{"target": {"1": -1}}',
        "[]",
        '{"target": {"1": 1}, "x": 1}',
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"costs\.json holds no table of costs"):
            read_costs(str(path))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run."""
    folder = tmp_path_factory.mktemp("run")
    target = tiny("llama", 3, vocab=len(tiny_tokenizer()))
    for name, model in (("target", target), ("draft", noisy_copy(target, 0.02))):
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    lines = ["def add(a, b):", "the cat sat on", "for i in range(10): print(i)", "aa ab"]
    (folder / "own.jsonl").write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    pair = ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--threads", "1"]
    more = ["--methods", "sd,suffix", "--dataset", str(folder / "own.jsonl"), "--rounds", "1"]
    done = commands.run("bench", *pair, *more, "--max-new-tokens", "24", "--out", str(folder / "out"))
    assert done.returncode == 0, done.stderr
    return folder / "out"


@dataclass(frozen=True)
class Done:
    returncode: object
    stdout: str
    stderr: str


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """`forerun simulate` in this process."""

    def called(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["forerun", "simulate", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(ended.value.code, *capsys.readouterr())

    return called


def datasets(done: Done) -> dict[str, dict[str, dict[str, float]]]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["datasets"]


@pytest.mark.slow
def test_a_recorded_run_at_other_costs(run: Path, simulate: Callable[..., Done], tmp_path: Path) -> None:
    records = Records(run / "records.jsonl")
    records.resume(["ar", "sd", "suffix"])
    path = tmp_path / "costs.json"

    def ratios(draft_ms: float) -> dict[str, float]:
        def one(record: Record) -> float:
            assert record.work is not None
            steps = sum(count * (5.0 + draft_ms * forwards) for count, _, _, forwards in record.work)
            return 24 * 5.0 / steps

        return {name: median(map(one, own(name))) for name in ("ar", "sd", "suffix")}

    def own(name: str) -> Sequence[Record]:
        return [record for record in records.all if record.method == name]

    for draft_ms in (0.0, 2.0):
        path.write_text(json.dumps({"target": {"1": 5.0}, "draft": {"1": draft_ms}}))
        (methods,) = datasets(simulate(str(run), "--costs", str(path), "--json")).values()
        assert {name: each["speedup"] for name, each in methods.items()} == pytest.approx(ratios(draft_ms), abs=1e-3)
    assert methods["ar"]["speedup"] == 1 < methods["sd"]["tau"]
    found = json.loads(simulate(str(run), "--costs", str(path), "--json").stdout)
    results = json.loads((run / "results.json").read_text())
    assert found["recorded"] == {key: results[key] for key in ("arguments", "versions", "date")}
    assert found["arguments"] == {"run": run.name, "costs": "costs.json", "learn": None}
    assert found["versions"]["cpu"] and found["date"].endswith(" UTC")
    shown = simulate(str(run), "--costs", "h100:llama-2-7b:llama-68m")
    assert shown.returncode == 0 and "suffix" in shown.stdout and "what forwards cost where" in shown.stdout


@pytest.mark.slow
def test_what_the_clock_said_beside_what_is_predicted(run: Path, simulate: Callable[..., Done]) -> None:
    for more in ((), ("--learn", str(run))):
        (methods,) = datasets(simulate(str(run), *more, "--json")).values()
        assert set(methods) == {"ar", "sd", "suffix"} and methods["ar"]["predicted"] == 1.0
        for each in methods.values():
            assert each["error"] == pytest.approx(each["predicted"] / each["measured"] - 1, abs=1e-3)


@pytest.mark.slow
def test_mistakes(run: Path, simulate: Callable[..., Done], tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for name in ("results.json", "records.jsonl"):
        (old / name).write_text((run / name).read_text())
    lines = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    (old / "records.jsonl").write_text("".join(json.dumps(line | {"work": None}) + "\n" for line in lines))
    one = tmp_path / "costs.json"
    one.write_text('{"target": {"1": 5}}')
    for arguments, message in (
        ((str(tmp_path),), "holds no run of `forerun bench --out` that can be simulated"),
        ((str(old),), "do not say what steps were"),
        ((str(run), "--costs", str(one)), "method 'sd' needs the costs of a draft; the table has none"),
        ((str(run), "--costs", str(one), "--learn", str(run)), "--learn is of no use with --costs"),
        ((str(run), "--costs", "h100"), "takes FILE.json or GPU"),
        ((str(run), "--costs", "h1005:llama-2-7b"), "the GPU must be one of"),
    ):
        done = simulate(*arguments)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
