"""`forerun tune`: prices against hand computation, the search on stub runs, profiles and who uses them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import commands
import pytest
import torch
from homes import home_at
from toys import noisy_copy, random_head, tiny, tiny_tokenizer

from forerun import ModelOptions, load
from forerun.api import profiles
from forerun.api.load import Decoder
from forerun.api.loading import load_model
from forerun.api.profiles import Choice, Pair, find, pair_of, read, save
from forerun.backends.costs import measure_costs
from forerun.api.resolve import resolve
from forerun.bench import tune
from forerun.bench.runners import Outcome, Run, decoder_run
from forerun.bench.tune import Prices, calibrate, candidates, choose_effort, finalists, kind, screen, singly
from forerun.cli import main
from forerun.engine.costs import Costs
from forerun.engine.engine import Step
from forerun.methods import AR, SD, Confidence, Cumulative, Lyanna, Method, Pacer, PacerEagle, Suffix
from forerun.model.causal_lm import CausalLM
from forerun.sampling.params import SamplingParams

COSTS = Costs(target={1: 10.0, 2: 10.0, 4: 12.0, 8: 20.0}, draft={1: 1.0, 2: 1.5})


def step(tokens: int, drafted: int, forwards: int | None = None, seconds: float = 0.0, index: int = 0) -> Step:
    return Step(
        id=index,
        number=0,
        rows=1,
        tokens=(0,) * tokens,
        origins=("draft",) * (tokens - 1) + ("bonus",),
        drafted=drafted,
        tested=min(drafted, tokens),
        accepted=tokens - 1,
        draft_forwards=drafted if forwards is None else forwards,
        seconds=seconds,
    )


def outcome(*rows: Sequence[Step], seconds: float = 0.0) -> Outcome:
    return Outcome([[0] * sum(len(each.tokens) for each in row) for row in rows], seconds, 0, 0, [*map(list, rows)])


# Prices


def test_a_step_costs_its_forwards_and_what_stands_beside_them() -> None:
    prices = Prices(COSTS, step_ms=0.5, token_ms={"sd": 0.25}, start_ms={"ar": 30.0, "sd": 36.0})
    assert prices.step("sd", step(2, drafted=3)) == 12.0 + 0.5 + 3 * (1.0 + 0.25)
    assert prices.step("sd", step(2, drafted=2)) == 11.0 + 0.5 + 2 * 1.25  # between two entries of the table
    assert prices.step("cumulative", step(2, drafted=3)) == 12.0 + 0.5 + 3 * 1.0  # a kind without a price of its own
    assert prices.step("suffix", step(3, drafted=7, forwards=0)) == 20.0 + 0.5
    assert prices.step("ar", step(1, drafted=0)) == prices.plain_ms == 10.5
    # In a batch the draft ran on for a row that went further.
    assert prices.step("sd", step(2, drafted=3, forwards=9)) == prices.step("sd", step(2, drafted=3))


def test_a_speedup_is_that_of_the_tokens_that_came() -> None:
    prices = Prices(COSTS, step_ms=0.5, token_ms={"sd": 0.25}, start_ms={"ar": 30.0, "sd": 36.0})
    found = prices.speedup("sd", [outcome([step(4, 3), step(2, 3)], [step(1, 3)]), outcome([step(4, 3)])])
    assert found == pytest.approx((11 * 10.5 + 3 * 30) / (4 * 16.25 + 3 * 36))
    assert prices.speedup("ar", [outcome([step(1, 0)] * 7)]) == 1.0


def test_calibration_finds_what_the_clock_says_beside_the_table() -> None:
    def run(*steps: Step, start: float) -> Run:
        def decoded(prompts: Any, seeds: Any, tokens: int | None = None) -> Outcome:
            return outcome(steps, seconds=start + sum(each.seconds for each in steps))

        return decoded

    runs = {
        "ar": run(*[step(1, 0, seconds=0.011)] * 3, start=0.04),
        "sd": run(*[step(2, 3, seconds=0.0145)] * 3, step(1, 3, seconds=9.0), step(1, 0, seconds=0.011), start=0.05),
        "suffix": run(step(2, 3, forwards=0, seconds=0.013), start=0.04),
    }
    prices = calibrate(Costs({1: 10.0, 4: 10.0}, {1: 1.0}), runs, [[1], [2]], 16)
    assert prices.step_ms == pytest.approx(1.0)
    assert prices.token_ms == {"sd": pytest.approx((14.5 - 10 - 1) / 3 - 1)}
    assert prices.load == pytest.approx((33 + 43.5 + 9000 + 11 + 13) / (33 + 58 + 11 + 11))
    assert prices.start_ms == {"ar": pytest.approx(40), "sd": pytest.approx(50), "suffix": pytest.approx(40)}


def test_costs_are_measured_for_what_is_there() -> None:
    target, draft = (Decoder(tiny("llama", seed, context=64)).target for seed in (0, 1))
    before = torch.get_rng_state()
    both, alone = measure_costs(target, draft), measure_costs(target)
    # How often it samples depends on the clock: what a user samples next, on every rank of a split target, may not.
    assert torch.equal(torch.get_rng_state(), before)
    assert set(both.target) == set(both.draft) == {1, 2, 4, 8, 16, 32}  # 64 tokens have room for 32 behind 32
    assert all(ms > 0 for ms in [*both.target.values(), *both.draft.values()])
    assert alone.draft == {} and set(alone.target) == set(both.target)
    with pytest.raises(ValueError, match="context of 64 has no room behind 64"):
        measure_costs(target, context=64)


# The search


def stub_runs(methods: dict[str, Method], accepted: Callable[[Method, int], int], calls: list[tuple[str, int]]) -> Any:
    """Runs whose steps draft gamma tokens, of which `accepted` are taken; it is given the prompt's number."""

    def make(name: str, method: Any) -> Run:
        def run(prompts: Any, seeds: Any, tokens: int | None = None) -> Outcome:
            calls.append((name, len(prompts)))
            rows = []
            for (prompt,) in prompts:
                gamma = method.gamma if method.needs_draft else 0
                rows.append([step(1 + accepted(method, prompt), gamma)] * 4)
            return outcome(*rows)

        return run

    return {name: make(name, method) for name, method in methods.items()}


def test_halving_finds_the_best_setting() -> None:
    methods: dict[str, Method] = {f"sd {gamma}": SD(gamma) for gamma in range(1, 13)}
    calls: list[tuple[str, int]] = []
    runs = stub_runs(methods, lambda method, prompt: min(method.gamma, 4), calls)  # type: ignore[union-attr]
    turns = [[[0]] * 3, [[1]] * 3, [[2]] * 3]
    ranked, dropped = screen(methods, runs, turns, Prices(COSTS))
    assert next(iter(ranked)) == "sd 4" and len(ranked) == 4 and ranked.keys() | dropped.keys() == methods.keys()
    assert ranked["sd 4"] == pytest.approx(5 * 10 / (14 + 4))
    assert list(ranked.values()) == sorted(ranked.values(), reverse=True)
    assert max(dropped.values()) < min(ranked.values())
    assert [count for name, count in calls if name == "sd 4"] == [3, 3, 3]
    assert [count for name, count in calls if name == "sd 12"] == [3]


def test_later_prompts_can_change_the_order_unless_it_is_late() -> None:
    methods: dict[str, Method] = {f"sd {gamma}": SD(gamma) for gamma in (1, 2, 3)}
    # Long drafts pay on the first prompt only.
    runs = stub_runs(methods, lambda method, prompt: method.gamma if prompt == 0 else 1, [])  # type: ignore[union-attr]
    turns = [[[0]], [[1]], [[1]]]
    assert next(iter(screen(methods, runs, turns, Prices(COSTS))[0])) == "sd 1"
    assert next(iter(screen(methods, runs, turns, Prices(COSTS), is_late=lambda: True)[0])) == "sd 3"


def test_when_it_is_late_in_the_first_turn_a_few_of_everything_have_been_tried() -> None:
    methods: dict[str, Method] = {f"sd {gamma}": SD(gamma) for gamma in range(1, 41)}
    runs = stub_runs(methods, lambda method, prompt: 1, [])
    ranked, dropped = screen(methods, runs, [[[0]], [[1]]], Prices(COSTS), is_late=lambda: True)
    tried = {methods[name].gamma for name in [*ranked, *dropped]}  # type: ignore[union-attr]
    assert len(tried) == 2 * tune.FINALISTS and len(ranked) == tune.FINALISTS
    assert min(tried) < 15 and max(tried) > 25


def test_finalists_are_of_different_methods_where_there_are() -> None:
    methods: dict[str, Method] = {
        "a": SD(4), "b": SD(5), "c": SD(6), "d": Cumulative(0.3), "e": Confidence(0.5), "f": Suffix(3.0),
    }  # fmt: skip
    assert finalists(methods, ["a", "b", "d", "c", "e", "f"]) == ["a", "d", "e"]
    assert finalists(methods, ["a", "b", "d", "c"]) == ["a", "d", "b"]
    assert finalists(methods, ["b", "a", "c"]) == ["b", "a", "c"]
    assert finalists(methods, ["f"]) == ["f"]


def test_candidates_fit_the_models() -> None:
    with_draft, without = candidates(True), candidates(False)
    assert with_draft["sd gamma=12"] == SD(12) and with_draft["suffix factor=2.0 most=8"] == Suffix(2.0, most=8)
    assert {method.name for method in without.values()} == {"suffix"}
    assert {method.name for method in candidates(True, thin=6).values()} == {each.name for each in with_draft.values()}
    assert len(candidates(True, thin=3)) <= len(with_draft) / 2


def test_methods_with_a_trained_layer_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Learned(SD):
        block: int = 2
        threshold: float | None = None
        name: ClassVar[str] = "pacer"
        layer: ClassVar[str] = "pre-verifier"

    monkeypatch.setitem(tune.METHODS, "pacer", Learned)  # type: ignore[arg-type]
    assert not any(name.startswith("pacer") for name in candidates(True))
    assert not any(name.startswith("pacer") for name in candidates(False, layers=["pre-verifier"]))
    found = candidates(True, layers=["pre-verifier"])
    assert found["pacer block=4 threshold=None"] == Learned(block=4)
    assert {kind(method) for method in found.values()} >= {"sd", "pacer block=1", "pacer block=4"}


def test_methods_with_a_head_need_it_and_cost_what_it_costs() -> None:
    assert not {"lyanna", "pacer-lyanna", "pacer-eagle"} & {method.name for method in candidates(True).values()}
    assert {method.name for method in candidates(False, layers=["lyanna"]).values()} >= {"lyanna", "pacer-lyanna"}
    with_eagle = {method.name for method in candidates(False, layers=["eagle"]).values()}
    assert "pacer-eagle" in with_eagle and not {"lyanna", "pacer-lyanna"} & with_eagle
    prices = Prices(Costs({1: 5.0, 9: 9.0}, {1: 1.0}, head={1: 0.25}), step_ms=1.0)
    drafted = step(1, 8, forwards=4)
    assert prices.step("lyanna", drafted) == 9 + 1 + 4 * 0.25 and prices.step("sd", drafted) == 9 + 1 + 4 * 1.0


def test_rows_one_by_one_are_the_rows_together() -> None:
    decoder = Decoder(tiny("llama"), draft=noisy_copy(tiny("llama"), 0.02), method=SD(3), guard=False)
    run = decoder_run(decoder, SamplingParams(max_new_tokens=9, temperature=1.0))
    prompts, seeds = [[1, 2, 3], [4, 5], [6]], [7, 8, 9]
    together, alone = run(prompts, seeds, None), singly(run)(prompts, seeds, 9)
    assert together.tokens == alone.tokens and len(alone.steps or []) == 3
    assert alone.target_forwards == together.target_forwards
    assert max(each.draft_forwards for row in alone.steps or [] for each in row) <= 3


def test_less_is_decoded_where_forwards_are_slow_or_the_budget_is_small() -> None:
    fast = Prices(Costs({1: 5.0, 32: 10.0}, {1: 0.4, 32: 1.0}))
    slow = Prices(Costs({1: 500.0, 32: 510.0}, {1: 100.0, 32: 100.0}))
    full, guess = choose_effort(1000, True, fast)
    assert (full.tokens, full.prompts, full.thin) == (128, 24, 1) and guess < 1000
    less, guess = choose_effort(60, True, fast)
    assert less.tokens < 128 and guess <= 60
    assert choose_effort(180, True, replace(fast, load=3.0)) == (less, pytest.approx(3 * guess))
    least, guess = choose_effort(60, True, slow)
    assert least == tune.EFFORTS[-1] and guess > 60


# Profiles


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = home_at(tmp_path / "home")
    monkeypatch.setenv("FORERUN_HOME", str(home))
    return home


def a_choice(method: Method, temperature: float = 0.0) -> Choice:
    return Choice(
        method=method.name,
        settings=asdict(method),
        predicted_speedup=2.5,
        measured_speedup=2.4,
        temperature=temperature,
        top_p=1.0,
        tuned={"sd": {"gamma": 7}},
        prompts={"dataset": "own.jsonl", "count": 3},
        pre_verifier=None,
        head=None,
        date="2025-01-01 00:00:00 UTC",
    )


PAIR = Pair("t", "d", "cpu", "float32", 1, "0123")


def test_a_profile_comes_back_as_it_was(own_home: Path) -> None:
    path = save(PAIR, "greedy", a_choice(SD(4)), COSTS, {"torch": "2"})
    assert path.parent == own_home / "profiles" and [*path.parent.iterdir()] == [path]
    found = read(path)
    assert found.pair == PAIR and found.costs == COSTS and found.versions == {"torch": "2"}
    assert found.greedy == a_choice(SD(4)) and found.greedy.build() == SD(4) and found.sampling is None
    save(PAIR, "sampling", a_choice(Cumulative(0.6), 1.0), COSTS, {"torch": "3"})
    both = read(path)
    assert both.greedy == found.greedy and both.versions == {"torch": "3"}
    assert both.choice(0.7) == a_choice(Cumulative(0.6), 1.0) and both.choice(0) == found.greedy


def test_a_profile_with_a_setting_that_is_gone_is_read_where_it_changed_nothing(own_home: Path) -> None:
    path = save(PAIR, "greedy", a_choice(Pacer(block=2)), COSTS, {})
    raw = json.loads(path.read_text())
    raw["greedy"]["settings"]["rho"], raw["greedy"]["tuned"]["pacer"] = 1.0, {"block": 2, "rho": 1.0}
    path.write_text(json.dumps(raw))
    found = read(path).greedy
    assert found is not None and found.build() == Pacer(block=2) and found.tuned["pacer"] == {"block": 2}
    raw["greedy"]["settings"]["rho"] = 1.1
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="no setting 'rho'"):
        read(path)


def test_a_write_that_fails_leaves_the_old_profile(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(PAIR, "greedy", a_choice(SD(4)), COSTS, {})
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ValueError, match=r"cannot write .*No space left on device; FORERUN_HOME may name another"):
        save(PAIR, "greedy", a_choice(SD(5)), COSTS, {})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda raw: "{", "Expecting"),
        (lambda raw: "[]", "a profile must be an object"),
        (lambda raw: json.dumps(raw | {"more": 1}), "unknown field 'more'"),
        (lambda raw: json.dumps({key: raw[key] for key in raw if key != "costs"}), "no field 'costs'"),
        (lambda raw: json.dumps(raw | {"costs": raw["costs"] | {"target": {}}}), "costs.target must be a table"),
        (lambda raw: json.dumps(raw | {"costs": raw["costs"] | {"draft": {"1": "x"}}}), "costs.draft must be"),
        (lambda raw: json.dumps(raw | {"greedy": raw["greedy"] | {"method": "turbo"}}), "unknown method 'turbo'"),
        (lambda raw: json.dumps(raw | {"greedy": raw["greedy"] | {"settings": {"beta": 1}}}), "no setting 'beta'"),
        (lambda raw: json.dumps(raw | {"greedy": raw["greedy"] | {"tuned": {"sd": 5}}}), "damaged"),
        (lambda raw: json.dumps(raw | {"greedy": raw["greedy"] | {"date": 5}}), "date must be str, not 5"),
        (lambda raw: json.dumps(raw | {"pair": raw["pair"] | {"threads": None}}), "threads must be int, not None"),
    ],
)
def test_a_damaged_profile_is_named_and_can_be_made_anew(
    own_home: Path, change: Callable[[dict[str, Any]], str], why: str
) -> None:
    path = save(PAIR, "greedy", a_choice(SD(4)), COSTS, {})
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(ValueError, match="run `forerun tune` again or delete it") as error:
        read(path)
    assert str(path) in str(error.value) and why in str(error.value)
    save(PAIR, "sampling", a_choice(SD(2), 1.0), COSTS, {})
    assert read(path).sampling == a_choice(SD(2), 1.0) and read(path).greedy is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    target = tiny("llama", 3, vocab=len(tiny_tokenizer()))
    for name, model in (("target", target), ("draft", noisy_copy(target, 0.02)), ("other", noisy_copy(target, 0.05))):
        model.save_pretrained(path / name)
        tiny_tokenizer().save_pretrained(path / name)
    lines = ["def add(a, b):", "the cat sat on", "for i in range(10): print(i)", "aa ab", "ba ab aa ba"]
    (path / "own.jsonl").write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    return path


def test_a_profile_is_for_one_pair_on_one_machine(folder: Path, own_home: Path) -> None:
    target, draft = folder / "target", folder / "draft"
    save(pair_of(target, draft, None, None), "greedy", a_choice(SD(4)), COSTS, {})
    assert find(target, draft, "cpu", torch.float32) is not None  # what the defaults mean on a CPU
    assert find(str(target), str(draft), "cpu", "float32") is not None
    assert find(target, folder / "other", "cpu", None) is None
    assert find(folder / "other", draft, "cpu", None) is None
    assert find(target, None, "cpu", None) is None
    assert find(target, draft, "cpu", "bfloat16") is None
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert find(target, draft, "cpu", None) is None
    finally:
        torch.set_num_threads(threads)
    assert pair_of(target, draft, "cpu", None).target == "target"  # the name alone: a profile may be shown around


def test_load_uses_the_profile_of_its_pair_and_a_named_method_wins(folder: Path, own_home: Path) -> None:
    target, draft = str(folder / "target"), str(folder / "draft")
    assert load(target, draft=draft).method == SD()
    pair = pair_of(target, draft, None, None)
    save(pair, "greedy", a_choice(Cumulative(0.7)), COSTS, {})
    tuned = load(target, draft=draft)
    assert tuned.method == Cumulative(0.7) and tuned.costs == COSTS
    assert tuned.method_for(greedy=False) == SD()  # sampling has not been tuned
    assert load(target, draft=draft, method="sd").method == SD()
    assert load(target, draft=draft, gamma=3).method == SD(3)
    assert load(target, draft=folder / "other").method == SD()
    assert load(target).method == Suffix()
    assert load(target, draft=draft, fast=False).method == SD()
    save(pair, "greedy", a_choice(Suffix(2.0)), COSTS, {})
    save(pair, "sampling", a_choice(AR(), 1.0), COSTS, {})
    assert load(target, draft=draft).draft is None  # nobody needs it


def test_a_profile_says_which_layer_and_head_were_tried(folder: Path, own_home: Path) -> None:
    pair = str(folder / "target"), str(folder / "draft")
    choice = replace(a_choice(SD(4)), pre_verifier="own", head="top")
    save(pair_of(*pair, None, None), "greedy", choice, COSTS, {})
    given: list[dict[str, Any]] = [{}, {"pre_verifier": "other"}, {"head": "mine"}, {"method": "sd"}]
    found = [resolve(*pair, **each, models=ModelOptions()) for each in given]
    parts = [(each.pre_verifier, each.head) for each in found]
    assert parts == [("own", "top"), ("other", "top"), ("own", "mine"), (None, None)]


def test_greedy_and_sampling_have_methods_of_their_own(folder: Path, own_home: Path) -> None:
    target, draft = str(folder / "target"), str(folder / "draft")
    pair = pair_of(target, draft, None, None)
    save(pair, "greedy", a_choice(Suffix(2.0)), COSTS, {})
    save(pair, "sampling", a_choice(SD(2), 1.0), COSTS, {})
    decoder = load(target, draft=draft, guard=False)
    assert decoder.method_for(greedy=True) == Suffix(2.0) and decoder.method_for(greedy=False) == SD(2)
    greedy = decoder.generate("the cat sat", max_new_tokens=12)
    drawn = decoder.generate("the cat sat", max_new_tokens=12, temperature=1.0, seed=1)
    assert greedy.stats.draft_forwards == 0 and drawn.stats.draft_forwards > 0
    assert max(each.drafted for each in drawn.steps) == 2
    with pytest.raises(ValueError, match="method 'sd' needs a draft model"):
        Decoder(decoder.target, decoder.tokenizer, method=AR(), sampling_method=SD(2))


def test_costs_are_measured_once_and_for_methods_that_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    monkeypatch.setattr(
        "forerun.api.decoder.measure_costs", lambda target, draft, **layer: measured.append(draft) or COSTS
    )
    model = tiny("llama")
    seen: list[Any] = []

    class Asking(AR):
        needs_costs = True

        def build(self, parts: Any) -> Any:
            seen.append(parts.costs)
            return super().build(parts)

    for method, expected in ((AR(), []), (Asking(), [None])):
        decoder = Decoder(model, method=method)
        for _ in range(2):
            decoder.generate([1, 2, 3], max_new_tokens=2)
        assert measured == expected
    assert seen == [COSTS]  # one drafter for both calls


# The command


def forerun(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.run(*arguments, env=os.environ | {"FORERUN_HOME": str(home)})


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Any]]:
    """Runs a command in this process, which has imported everything; returns the JSON that it printed."""
    threads = torch.get_num_threads()

    def run(*arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["forerun", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        return json.loads(capsys.readouterr().out)

    yield run
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_tune_then_generate_info_and_bench(folder: Path, own_home: Path, inside: Callable[..., Any]) -> None:
    pair = ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--threads", "1"]
    done = forerun(own_home, "tune", *pair, "--data", str(folder / "own.jsonl"), "--budget", "2", "--json")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    found = json.loads(done.stdout)
    (path,) = (own_home / "profiles").iterdir()
    assert found["profile"] == str(path) and str(folder) not in path.read_text()
    profile = read(path)
    assert profile.greedy is not None and profile.sampling is None and set(profile.costs.draft) == {1, 2, 4, 8, 16, 32}
    assert found["measured"]["ar"] == found["predicted"]["ar"] == 1.0 and len(found["measured"]) == 4
    assert found["measured_speedup"] == max(found["measured"].values())
    assert {name.partition(" ")[0] for name in found["predicted"]} == {"ar", *found["tuned"]} >= {"sd", "suffix"}
    assert profile.greedy.prompts["dataset"] == "own.jsonl"
    assert found["versions"] == profile.versions and found["date"].endswith(" UTC")
    assert found["arguments"]["target"] == "target" and found["arguments"]["budget"] == 2.0
    assert str(folder) not in json.dumps(found["arguments"])

    # Whatever was fastest here, what is stored is what runs.
    save(profile.pair, "greedy", replace(profile.greedy, method="suffix", settings={"most": 4, "width": 2}),
         profile.costs, profile.versions)  # fmt: skip
    asked = ["generate", "the cat sat on the", *pair, "--max-new-tokens", "8", "--json"]
    tuned, named = inside(*asked), inside(*asked, "--method", "sd")
    sampled = inside(*asked, "--temperature", "1", "--seed", "0")
    assert [each["method"] for each in (tuned, named, sampled)] == ["suffix", "sd", "sd"]
    assert tuned["tokens"] == named["tokens"]
    shown = inside("info", *pair, "--json")["profile"]
    assert shown["file"] == str(path) and shown["greedy"]["method"] == "suffix" and shown["sampling"] is None
    bench = ["bench", *pair, "--dataset", str(folder / "own.jsonl"), "--limit", "1", "--rounds", "1", "--json"]
    ran = inside(*bench, "--max-new-tokens", "4", "--methods", "sd,suffix", "--method-arg", "suffix.most=9")
    used = ran["arguments"]["methods"]
    assert used["sd"] == found["tuned"]["sd"]
    assert used["suffix"] == found["tuned"]["suffix"] | {"most": 9}


@pytest.mark.slow
def test_tune_with_a_head(folder: Path, own_home: Path, tmp_path: Path) -> None:
    target = CausalLM(load_model(folder / "target", "target", device="cpu"))
    random_head(target).save_pretrained(tmp_path / "head")
    asked = ["tune", "--target", str(folder / "target"), "--data", str(folder / "own.jsonl"), "--threads", "1"]
    done = forerun(own_home, *asked, "--budget", "1", "--head", str(tmp_path / "head"), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["head"] == str(tmp_path / "head") and set(found["tuned"]) >= {"lyanna", "pacer-lyanna", "suffix"}
    (path,) = (own_home / "profiles").iterdir()
    profile = read(path)
    save(profile.pair, "greedy", replace(a_choice(Lyanna()), head=found["head"]), profile.costs, profile.versions)
    assert load(str(folder / "target"), device="cpu").method == Lyanna()
    random_head(target, kind="eagle").save_pretrained(tmp_path / "eagle")
    save(profile.pair, "sampling", replace(a_choice(PacerEagle()), head=str(tmp_path / "eagle")), profile.costs, {})
    both = load(str(folder / "target"), device="cpu")  # a decoder has one head: that of greedy decoding
    assert both.method == both.method_for(greedy=False) == Lyanna() and both.head is not None
    save(profile.pair, "greedy", replace(a_choice(Suffix()), head=found["head"]), profile.costs, {})
    other = load(str(folder / "target"), device="cpu")  # each choice has its own head
    assert other.method == Suffix() and other.method_for(greedy=False) == PacerEagle()
    wrong = forerun(own_home, *asked, "--head", str(tmp_path))
    assert (
        wrong.returncode == 2 and f"--head takes the folder of a trained head, and '{tmp_path}' is none" in wrong.stderr
    )


@pytest.mark.slow
def test_tune_for_sampling_without_a_draft(folder: Path, tmp_path: Path) -> None:
    drawing = ["--temperature", "0.8", "--top-p", "0.9"]
    asked = ["--target", str(folder / "target"), "--data", str(folder / "own.jsonl"), "--threads", "1", "--budget", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "forerun", "tune", *asked, *drawing],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"FORERUN_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "profiles").iterdir()
    profile = read(path)
    assert profile.greedy is None and profile.costs.draft == {} and profile.pair.draft is None
    assert profile.sampling is not None and (profile.sampling.temperature, profile.sampling.top_p) == (0.8, 0.9)
    assert str(path) in done.stdout and "predicted" in done.stdout
    assert re.search("measuring (look|suffix)", done.stderr)  # which one is first, the clock decides


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-p", "0.5"], "--top-p 0.5 needs a --temperature above 0"),
        (["--top-p", "2", "--temperature", "1"], "top_p must be above 0 and at most 1, not 2.0"),
        (["--temperature", "-1"], "temperature must be 0 (greedy) or at least 0.001, not -1.0"),
        (["--data", "prompts.txt"], "--data takes a .jsonl file with a prompt a line, not 'prompts.txt'"),
        (["--data", "nothing.jsonl"], "cannot read nothing.jsonl: No such file or directory"),
        (["--target", "./nothing"], "no model folder './nothing' for the target"),
        (["--budget", "0"], "Invalid value for '--budget'"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = forerun(tmp_path, "tune", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert message in done.stderr


def test_the_embedded_pair_has_costs_of_its_own(own_home: Path) -> None:
    ours = profiles.shipped("embedded", None)
    assert ours is not None and ours.costs is not None
    costs = ours.costs
    assert 0 < costs.c < 1
    assert costs.verify(1) <= costs.verify(8) <= costs.verify(32)


def test_the_suite_keeps_away_from_the_home_of_who_runs_it() -> None:
    assert profiles.home() != Path.home() / ".cache" / "forerun"
