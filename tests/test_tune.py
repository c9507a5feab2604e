"""`forerun tune`: the search on stub runs, profiles and what reads them."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import commands
import pytest
import torch
from homes import home_at
from toys import noisy_copy, random_head, refuses, save_lines, save_models, tiny, tiny_tokenizer

from forerun import ModelOptions, load
from forerun.api import profiles
from forerun.api.load import Decoder
from forerun.api.loading import load_model
from forerun.api.profiles import Choice, Pair, find, pair_of, read, save
from forerun.api.resolve import resolve
from forerun.backends.costs import measure_costs
from forerun.bench import tune
from forerun.bench.measure import Outcome, Run
from forerun.bench.tune import candidates, new_tokens, rate, search
from forerun.engine.costs import Costs, costs_of
from forerun.engine.engine import Step
from forerun.methods import AR, SD, Cumulative, Lyanna, Method, Pacer, PacerEagle, Suffix
from forerun.model.causal_lm import CausalLM

COSTS = Costs(target={1: 10.0, 2: 10.0, 4: 12.0, 8: 20.0}, draft={1: 1.0, 2: 1.5})


def step(tokens: int, seconds: float) -> Step:
    return Step(id=0, number=0, rows=1, tokens=(0,) * tokens, seconds=seconds)


def stub_runs(speed: Callable[[int, int], float], calls: list[int], count: int) -> dict[str, Run]:
    """`ar` makes one token a second, and method `sd GAMMA` as many as `speed` of gamma and the prompt says."""

    def make(gamma: int) -> Run:
        def run(prompts: Any, seeds: Any, tokens: int | None = None) -> Outcome:
            calls.append(gamma)
            ((prompt,),) = prompts
            row = [step(4, 4 / (speed(gamma, prompt) if gamma else 1.0))] * 2
            return Outcome([[0] * 8], seconds=99.0, target_forwards=2, draft_forwards=0, steps=[row])

        return run

    return {"ar": make(0)} | {f"sd {gamma}": make(gamma) for gamma in range(1, count + 1)}


def test_halving_finds_the_best_setting() -> None:
    calls: list[int] = []
    runs = stub_runs(lambda gamma, prompt: 3 - abs(gamma - 4) / 10, calls, 12)
    ranked, dropped = search(runs, [[[0], [1]], [[2]], [[3]]], 16)
    assert next(iter(ranked)) == "sd 4" and ranked["sd 4"] == pytest.approx(3.0) and len(ranked) == 3
    assert list(ranked.values()) == sorted(ranked.values(), reverse=True)
    assert max(dropped.values()) < min(ranked.values()) and len(ranked | dropped) == 12
    assert calls.count(4) == calls.count(0) == 4 and calls.count(12) == 2


def test_later_prompts_can_change_the_order_unless_it_is_late() -> None:
    # Long drafts pay on the first prompt only.
    runs = stub_runs(lambda gamma, prompt: gamma if prompt == 0 else 1 / gamma, [], 3)
    turns = [[[0]], [[1], [1]]]
    assert next(iter(search(runs, turns, 16)[0])) == "sd 1"
    assert next(iter(search(runs, turns, 16, is_late=lambda: True)[0])) == "sd 3"
    # Where it is late in the first turn, a few of everything have been tried.
    ranked, dropped = search(stub_runs(lambda gamma, prompt: gamma, [], 40), [[[0]], [[1]]], 16, is_late=lambda: True)
    tried = {int(name.split()[1]) for name in ranked | dropped}
    assert len(tried) == 2 * tune.FINALISTS and len(ranked) == tune.FINALISTS
    assert min(tried) < 15 and max(tried) > 25


def test_fewer_tokens_are_decoded_if_forwards_are_slow_or_the_budget_is_small() -> None:
    # The rate leaves out the time to read the prompt.
    assert rate(Outcome([[0] * 6], 50.0, 2, 0, [[step(4, 1.0), step(2, 2.0)]])) == pytest.approx(2.0)
    assert new_tokens(1000, 60, 5.0, 256) == tune.TOKENS[1] and new_tokens(1000, 60, 5.0, 32) == 32
    assert tune.TOKENS[0] < new_tokens(60, 60, 5.0, 256) < tune.TOKENS[1]
    assert new_tokens(60, 60, 500.0, 256) == tune.TOKENS[0]


def test_candidates_fit_the_models_layers_and_heads() -> None:
    def names(draft: bool, *layers: str) -> set[str]:
        return {method.name for method in candidates(draft, layers).values()}

    with_draft = candidates(True)
    assert with_draft["sd gamma=12"] == SD(12) and with_draft["suffix factor=2.0 most=8"] == Suffix(2.0, most=8)
    assert names(False) == {"suffix"}
    assert not {"pacer", "lyanna", "pacer-lyanna", "pacer-eagle"} & names(True)
    assert "pacer" not in names(False, "pre-verifier") and "pacer" in names(True, "pre-verifier")
    assert candidates(True, ["pre-verifier"])["pacer block=4 threshold=None"] == Pacer(block=4)
    assert names(False, "lyanna") >= {"lyanna", "pacer-lyanna"}
    assert "pacer-eagle" in names(False, "eagle") and not {"lyanna", "pacer-lyanna"} & names(False, "eagle")


def test_costs_are_measured_for_what_is_there() -> None:
    target, draft = (Decoder(tiny("llama", seed, context=64)).target for seed in (0, 1))
    before = torch.get_rng_state()
    both, alone = measure_costs(target, draft), measure_costs(target)
    # How often it samples depends on the clock: what a user samples next, on every rank of a split target, may not.
    assert torch.equal(torch.get_rng_state(), before)
    assert set(both.target) == set(both.draft) == {1, 2, 4, 8, 16, 32}  # 64 tokens have room for 32 behind 32
    assert all(ms > 0 for ms in [*both.target.values(), *both.draft.values()])
    assert alone.draft == {} and set(alone.target) == set(both.target)
    refuses("context of 64 is full after 64 tokens", measure_costs, target, context=64)


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = home_at(tmp_path / "home")
    monkeypatch.setenv("FORERUN_HOME", str(home))
    return home


def a_choice(method: Method, temperature: float = 0.0) -> Choice:
    sampling = {"temperature": temperature, "top_p": 1.0}
    prompts, date = {"dataset": "own.jsonl", "count": 3}, "2025-01-01 00:00:00 UTC"
    other = {"tuned": {"sd": {"gamma": 7}}, "prompts": prompts, "pre_verifier": None, "head": None, "date": date}
    return Choice(method.name, asdict(method), 2.4, **sampling, **other)


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
    # What an earlier version had is left out.
    raw = json.loads(path.read_text())
    raw["greedy"]["predicted_speedup"] = 2.5
    raw["greedy"]["settings"]["gone"] = raw["greedy"]["tuned"]["sd"]["gone"] = "x"
    raw["greedy"]["tuned"]["lookup"] = {"gamma": 3}
    path.write_text(json.dumps(raw))
    assert read(path).greedy == a_choice(SD(4))


def test_a_write_that_fails_leaves_the_old_profile(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(PAIR, "greedy", a_choice(SD(4)), COSTS, {})
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(ValueError, match=r"cannot write .*No space left on device; FORERUN_HOME may name another"):
        save(PAIR, "greedy", a_choice(SD(5)), COSTS, {})
    assert path.read_bytes() == before


def test_a_damaged_profile_is_named_and_can_be_made_anew(own_home: Path) -> None:
    path = save(PAIR, "greedy", a_choice(SD(4)), COSTS, {})
    raw = json.loads(path.read_text())
    costs, greedy = raw["costs"], raw["greedy"]
    for text, why in (
        ("{", "Expecting"),
        ("[]", "version: run"),
        (json.dumps(raw | {"more": 1}), "version: run"),
        (json.dumps({key: raw[key] for key in raw if key != "costs"}), "version: run"),
        (json.dumps(raw | {"costs": costs | {"target": {}}}), "with entries for the target"),
        (json.dumps(raw | {"costs": costs | {"target": {"1": 0}}}), "target must be above 0"),
        (json.dumps(raw | {"costs": costs | {"draft": {"1": "x"}}}), "could not convert"),
        (json.dumps(raw | {"costs": costs | {"draft": {"1": inf}}}), "costs must map numbers of tokens to"),
        (json.dumps(raw | {"greedy": greedy | {"method": "turbo"}}), "unknown method 'turbo'"),
        (json.dumps(raw | {"greedy": greedy | {"settings": {"gamma": 0}}}), "not 0"),
        (json.dumps(raw | {"greedy": greedy | {"measured_speedup": "x"}}), "could not convert"),
        (json.dumps(raw | {"greedy": greedy | {"tuned": {"sd": 5}}}), "damaged"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match="run `forerun tune` again or delete it") as error:
            read(path)
        assert str(path) in str(error.value) and why in str(error.value)
        save(PAIR, "sampling", a_choice(SD(2), 1.0), COSTS, {})
        assert read(path).sampling == a_choice(SD(2), 1.0) and read(path).greedy is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tiny("llama", 3, vocab=len(tiny_tokenizer()))
    models = {"target": target, "draft": noisy_copy(target, 0.02), "other": noisy_copy(target, 0.05)}
    path = save_models(tmp_path_factory.mktemp("pair"), **models)
    lines = ["def add(a, b):", "the cat sat on", "for i in range(10): print(i)", "aa ab", "ba ab aa ba"]
    save_lines(path / "own.jsonl", ({"prompt": line} for line in lines))
    return path


def test_a_profile_is_for_one_pair_on_one_machine(folder: Path, own_home: Path) -> None:
    target, draft, other = folder / "target", folder / "draft", folder / "other"

    def is_tuned(target: str | Path, draft: str | Path | None, **how: Any) -> bool:
        return find(pair_of(target, draft, ModelOptions(**{"device": "cpu"} | how))) is not None

    pair = pair_of(target, draft, ModelOptions())
    save(pair, "greedy", a_choice(SD(4)), COSTS, {})
    assert is_tuned(target, draft, dtype=torch.float32)  # what the defaults mean on a CPU
    assert is_tuned(str(target), str(draft), dtype="float32") and is_tuned(target, draft, weights="auto")
    assert not any(is_tuned(*models) for models in ((target, other), (other, draft), (target, None)))
    assert not any(is_tuned(target, draft, **how) for how in ({"dtype": "bfloat16"}, {"draft_weights": "int4"}))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert not is_tuned(target, draft)
    finally:
        torch.set_num_threads(threads)
    assert pair.target == "target"  # the name alone: a profile may be shown around


def keep(folder: Path, **choices: Choice) -> tuple[str, str]:
    """Store choices for the folder's pair, each by its mode; return the pair."""
    pair = str(folder / "target"), str(folder / "draft")
    for mode, choice in choices.items():
        save(pair_of(*pair, ModelOptions()), mode, choice, COSTS, {})
    return pair


def test_load_uses_the_profile_of_its_pair_and_a_named_method_wins(folder: Path, own_home: Path) -> None:
    target, draft = keep(folder)
    assert load(target, draft=draft).method == SD()
    keep(folder, greedy=a_choice(Cumulative(0.7)))
    tuned = load(target, draft=draft)
    assert tuned.method == Cumulative(0.7) and tuned.costs == COSTS
    assert tuned.method_for(greedy=False) == SD()  # sampling has not been tuned
    for options, method in (({"method": "sd"}, SD()), ({"gamma": 3}, SD(3)), ({"fast": False}, SD())):
        assert load(target, draft=draft, **options).method == method
    assert load(target, draft=folder / "other").method == SD() and load(target).method == Suffix()
    keep(folder, greedy=a_choice(Suffix(2.0)), sampling=a_choice(AR(), 1.0))
    assert load(target, draft=draft).draft is None  # nobody needs it
    # It says which layer and head were tried.
    keep(folder, greedy=replace(a_choice(SD(4)), pre_verifier="own", head="top"))
    given: list[dict[str, Any]] = [{}, {"pre_verifier": "other"}, {"head": "mine"}, {"method": "sd"}]
    found = [resolve(target, draft, **each, models=ModelOptions()) for each in given]
    parts = [(each.pre_verifier, each.head) for each in found]
    assert parts == [("own", "top"), ("other", "top"), ("own", "mine"), (None, None)]
    # Greedy decoding and sampling have methods of their own.
    keep(folder, greedy=a_choice(Suffix(2.0)), sampling=a_choice(SD(2), 1.0))
    decoder = load(target, draft=draft, guard=False)
    assert decoder.method_for(greedy=True) == Suffix(2.0) and decoder.method_for(greedy=False) == SD(2)
    greedy = decoder.generate("the cat sat", max_new_tokens=12)
    drawn = decoder.generate("the cat sat", max_new_tokens=12, temperature=1.0, seed=1)
    assert greedy.stats.draft_forwards == 0 and drawn.stats.draft_forwards > 0
    assert max(each.drafted for each in drawn.steps) == 2
    with pytest.raises(ValueError, match="method 'sd' needs a draft model"):
        Decoder(decoder.target, decoder.tokenizer, method=AR(), sampling_method=SD(2))


def test_costs_are_measured_once_and_for_methods_that_ask(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Mock(return_value=COSTS)
    monkeypatch.setattr("forerun.api.build.measure_costs", measure)
    model = tiny("llama")
    seen: list[Any] = []

    class Asking(AR):
        needs_costs = True

        def build(self, parts: Any) -> Any:
            seen.append(parts.costs)
            return super().build(parts)

    for method, expected in ((AR(), 0), (Asking(), 1)):
        decoder = Decoder(model, method=method)
        for _ in range(2):
            decoder.generate([1, 2, 3], max_new_tokens=2)
        assert measure.call_count == expected
    assert seen == [COSTS]  # one drafter for both calls
    Decoder(model, method=Asking()).generate([1, 2, 3], max_new_tokens=2)
    assert measure.call_count == 1 and seen == [COSTS, COSTS]  # kept in a file
    (file,) = (own_home / "costs").iterdir()
    file.write_text(file.read_text()[:-9])
    Decoder(model, method=Asking()).generate([1, 2, 3], max_new_tokens=2)
    assert measure.call_count == 2 and costs_of(json.loads(file.read_text())) == COSTS
    Decoder(tiny("llama", 1), method=Asking()).generate([1, 2, 3], max_new_tokens=2)
    assert measure.call_count == 3  # of another model


def forerun(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = commands.run(*arguments)
    assert done.returncode == 0, done.stderr
    return done


def printed(*arguments: str) -> Any:
    """The JSON of a command."""
    done = forerun(*arguments)
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.slow
def test_tune_then_generate_info_and_bench(folder: Path, own_home: Path) -> None:
    pair = ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--threads", "1"]
    found = printed("tune", *pair, "--data", str(folder / "own.jsonl"), "--budget", "2", "--json")
    (path,) = (own_home / "profiles").iterdir()
    assert found["profile"] == str(path) and str(folder) not in path.read_text()
    profile = read(path)
    assert profile.greedy is not None and profile.sampling is None and set(profile.costs.draft) == {1, 2, 4, 8, 16, 32}
    assert found["measured"]["ar"] == 1.0
    assert found["measured_speedup"] == max([*found["measured"].values()][:2])  # of ar, and the best of the last turn
    assert {name.partition(" ")[0] for name in found["measured"]} == {"ar", *found["tuned"]} >= {"sd", "suffix"}
    assert profile.greedy.prompts["dataset"] == "own.jsonl"
    assert found["versions"] == profile.versions and found["date"].endswith(" UTC")
    assert found["arguments"]["target"] == "target" and found["arguments"]["budget"] == 2.0
    assert str(folder) not in json.dumps(found["arguments"])

    # Whatever was fastest here, what is stored is what runs.
    save(profile.pair, "greedy", replace(profile.greedy, method="suffix", settings={"most": 4}),
         profile.costs, profile.versions)  # fmt: skip
    asked = ["generate", "the cat sat on the", *pair, "--max-new-tokens", "8", "--json"]
    tuned, named = printed(*asked), printed(*asked, "--method", "sd")
    sampled = printed(*asked, "--temperature", "1", "--seed", "0")
    assert [each["method"] for each in (tuned, named, sampled)] == ["suffix", "sd", "sd"]
    assert tuned["tokens"] == named["tokens"]
    shown = printed("info", *pair, "--json")["profile"]
    assert shown["file"] == str(path) and shown["greedy"]["method"] == "suffix" and shown["sampling"] is None
    bench = ["bench", *pair, "--dataset", str(folder / "own.jsonl"), "--limit", "1", "--rounds", "1", "--json"]
    ran = printed(*bench, "--max-new-tokens", "4", "--methods", "sd,suffix", "--method-arg", "suffix.most=9")
    used = ran["arguments"]["methods"]
    assert used["sd"] == found["tuned"]["sd"]
    assert used["suffix"] == found["tuned"]["suffix"] | {"most": 9}


@pytest.mark.slow
def test_tune_for_sampling_with_a_head_and_without_a_draft(folder: Path, own_home: Path, tmp_path: Path) -> None:
    target, name = CausalLM(load_model(folder / "target", "target", device="cpu")), str(folder / "target")
    heads = {kind: str(tmp_path / kind) for kind in ("lyanna", "eagle")}
    for kind, head in heads.items():
        random_head(target, kind=kind).save_pretrained(head)
    asked = ["tune", "--target", name, "--data", str(folder / "own.jsonl"), "--threads", "1", "--budget", "1"]
    done = forerun(*asked, "--head", heads["lyanna"], "--temperature", "0.8", "--top-p", "0.9")
    (path,) = (own_home / "profiles").iterdir()
    assert str(path) in done.stdout and "speedup over plain decoding" in done.stdout
    assert re.search(r"own.jsonl has \d+ prompts: with fewer than 20 the choice may be that of chance", done.stderr)
    profile, sampling = read(path), read(path).sampling
    assert profile.greedy is None and profile.costs.draft == {} and profile.pair.draft is None
    assert sampling is not None and (sampling.temperature, sampling.top_p) == (0.8, 0.9)
    assert sampling.head == heads["lyanna"] and set(sampling.tuned) >= {"lyanna", "pacer-lyanna", "suffix"}

    def decoder(**choices: Choice) -> Decoder:
        for mode, choice in choices.items():
            save(profile.pair, mode, choice, profile.costs, profile.versions)
        return load(name, device="cpu")

    greedy = replace(a_choice(Lyanna()), head=heads["lyanna"])
    both = decoder(greedy=greedy, sampling=replace(a_choice(PacerEagle(), 1.0), head=heads["eagle"]))
    # A decoder has one head: that of greedy decoding.
    assert both.method == both.method_for(greedy=False) == Lyanna() and both.head is not None
    other = decoder(greedy=replace(a_choice(Suffix()), head=heads["lyanna"]))  # each choice has its own head
    assert other.method == Suffix() and other.method_for(greedy=False) == PacerEagle()


def test_the_embedded_pair_has_costs_of_its_own(own_home: Path) -> None:
    ours = profiles.shipped("embedded", None)
    assert 0 < ours.costs.c < 1
    assert ours.costs.verify(1) <= ours.costs.verify(8) <= ours.costs.verify(32)
