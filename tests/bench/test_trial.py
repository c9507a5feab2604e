"""`forerun try`: which method it recommends, and that it runs on any model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from forerun.api.choose import resolve
from forerun.bench import trial
from forerun.bench.trial import Answer, Round, Verdict, contenders, runnable
from forerun.bench.trial_prompts import CODE, EDIT, TASKS, encoded
from forerun.cli import try_model
from forerun.cli.commands import app
from forerun.cli.try_model import advice, method_options
from forerun.methods import AR, SD, Hybrid, Lyanna, Suffix, method
from tests.support.ggufs import small, write
from tests.support.toys import tiny

METHODS = {"ar": AR(), "sd": SD(), "suffix": Suffix(), "lyanna": Lyanna()}
WORDS = list(range(10))


def answers(tokens: list[int] = WORDS, **gains: float) -> Round:
    """A round in which each method is so many times as fast as plain decoding, in every task."""
    times = {"ar": 1.0} | gains
    return {
        name: {task.name: Answer(tokens, 1 / gain) for task in TASKS}
        for name, gain in times.items()
    }


def verdict(*rounds: Round, exact: str = "bitwise") -> Verdict:
    lengths = {task.name: 2000 for task in TASKS}
    names = {name: METHODS[name] for name in rounds[0]}
    return Verdict(names, list(rounds), lengths, exact, 1.0)


def test_the_median_round_counts_and_not_the_luckiest() -> None:
    lucky = verdict(
        answers(sd=3.0, suffix=1.4), answers(sd=1.2, suffix=1.5), answers(sd=1.3, suffix=1.4)
    )
    assert lucky.best == "suffix" and lucky.overall["sd"] == pytest.approx(1.3)
    assert advice(lucky)[0] == "Use suffix: 1.4 times as fast as plain decoding, the same words."


def test_a_drifting_machine_changes_no_figure() -> None:
    """A round of a machine that is three times as slow has the same gains."""
    slow = {
        name: {task: replace(each, seconds=3 * each.seconds) for task, each in row.items()}
        for name, row in answers(sd=1.5).items()
    }
    assert verdict(answers(sd=1.5), slow).overall["sd"] == pytest.approx(1.5)


def test_every_task_counts_alike() -> None:
    uneven = answers(sd=1.5, suffix=1.0)
    uneven["suffix"][EDIT.name] = Answer(WORDS, 1 / 3)
    told = verdict(uneven)
    assert told.overall["suffix"] == pytest.approx(3 ** (1 / 3))
    assert told.best == "sd" and told.best_of(EDIT.name) == "suffix"
    assert "For edit alone suffix is faster (3.0 times)." in advice(told)


def test_of_methods_that_are_alike_the_simplest_is_recommended() -> None:
    assert verdict(answers(sd=1.51, suffix=1.5, lyanna=1.505)).best == "suffix"
    assert verdict(answers(sd=1.51, suffix=1.4, lyanna=1.5)).best == "lyanna"
    assert verdict(answers(sd=1.6, suffix=1.5)).best == "sd"
    plain = verdict(answers(sd=1.01, suffix=0.9))
    assert plain.best == "ar" and advice(plain)[0].startswith("Use plain decoding")


def test_the_default_that_ships_with_a_target_needs_a_clear_reason_to_be_left() -> None:
    for lyanna, best in ((1.5, "lyanna"), (1.3, "suffix")):
        told = replace(verdict(answers(suffix=1.6, lyanna=lyanna)), default="lyanna")
        assert told.best == best
    assert replace(verdict(answers(suffix=0.9, lyanna=1.0)), default="lyanna").best == "ar"


def test_a_method_with_other_words_is_never_recommended() -> None:
    wrong = answers(sd=2.0, suffix=1.5)
    wrong["sd"][CODE.name] = Answer([0, 1, 7, 3], 0.1)
    told = verdict(answers(sd=2.0, suffix=1.5), wrong)
    assert told.best == "suffix" and told.differences == {"sd": ("code", 2)}
    assert "sd differs from plain decoding: token 3 of code." in advice(told)
    assert "please report it" in advice(told)[-1]
    shorter = answers(sd=2.0)
    shorter["sd"][CODE.name] = Answer(WORDS[:4], 0.1)
    assert verdict(shorter).differences == {"sd": ("code", 4)}
    assert "round differently" in advice(verdict(shorter, exact="rounding"))[-1]


def test_methods_that_are_far_behind_leave() -> None:
    names = ["ar", "sd", "suffix", "lyanna"]
    first = answers(sd=2.0, suffix=1.7, lyanna=1.3)
    for count, in_haste, at_leisure in (
        (1, ["ar", "sd", "suffix"], names),
        (2, ["ar", "sd"], ["ar", "sd", "suffix"]),
        (3, ["ar", "sd"], ["ar", "sd"]),
    ):
        assert contenders(names, [first] * count, is_in_haste=True) == in_haste
        assert contenders(names, [first] * count, is_in_haste=False) == at_leisure
    told = verdict(first, answers(sd=2.0, suffix=1.7))
    assert told.as_dict()["methods"]["lyanna"]["rounds"] == 1


def test_the_methods_that_can_run_are_those_that_have_what_they_need(tmp_path: Path) -> None:
    file = str(write(tmp_path / "model.gguf", small(max_position_embeddings=512)))
    assert list(runnable(file, None, None)) == ["ar", "suffix"]
    with_draft = runnable(file, file, None)
    assert {"sd", "cumulative", "hybrid", "ouroboros"} <= with_draft.keys()
    assert not {"pacer", "lyanna", "eagle"} & with_draft.keys()
    embedded = runnable("embedded", "embedded", None)
    assert {"pacer", "lyanna", "pacer-lyanna"} <= embedded.keys()
    assert embedded["sd"] == method("sd", gamma=6)  # as it ships with the target


def test_options_give_back_the_recommended_method(tmp_path: Path) -> None:
    """None for the method that is taken anyway."""
    file = str(write(tmp_path / "model.gguf", small(max_position_embeddings=512)))
    assert method_options(file, None, Suffix()) == []
    for given in (SD(gamma=3), Hybrid(other="cumulative:threshold=0.5"), AR()):
        words = method_options(file, file, given)
        settings = [words[place + 1] for place, word in enumerate(words) if word == "--method-arg"]
        assert words[0] == "--method" and resolve(file, file, words[1], settings).method == given


def test_the_long_prompt_fills_what_there_is() -> None:
    for limit in (60, 300, 2000):
        ids = encoded(EDIT, None, 50, limit)
        assert limit - 100 < len(ids) <= limit and max(ids) < 50
    assert len(encoded(CODE, None, 50, 2000)) < 100


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MAX_ANSWER", 20)
    monkeypatch.setattr(trial, "MAX_TRIAL_ROUNDS", 2)
    monkeypatch.setattr(try_model, "quiet", lambda threads: None)


def test_any_model_of_transformers_can_be_tried(
    tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one without a tokenizer, whose context is short."""
    folder = str(tmp_path / "gemma")
    tiny("gemma").save_pretrained(folder)
    done = CliRunner().invoke(app, ["try", folder])
    assert done.exit_code == 0, done.output
    assert "no tokenizer" in done.stderr and "round 1" in done.stderr
    assert "suffix" in done.stdout and "\x1b" not in done.stdout
    assert f"forerun generate --target {folder}" in done.stdout


def test_a_file_and_its_draft_are_tried_with_all_methods(tmp_path: Path, short: None) -> None:
    file = str(write(tmp_path / "model.gguf", small(max_position_embeddings=512)))
    draft = str(write(tmp_path / "draft.gguf", small(max_position_embeddings=512, seed=1)))
    done = CliRunner().invoke(app, ["try", file, "--draft", draft, "--json"])
    assert done.exit_code == 0, done.output
    told: dict[str, Any] = json.loads(done.stdout)
    assert all(row["equal"] for row in told["methods"].values())
    assert told["methods"].keys() == runnable(file, draft, None).keys()
    assert told["prompt_tokens"]["edit"] > 400 and told["command"].startswith("forerun chat ")


def test_a_difference_is_told_by_the_exit_status(
    tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(write(tmp_path / "model.gguf", small(max_position_embeddings=512)))
    wrong = answers(suffix=2.0)
    wrong["suffix"][CODE.name] = Answer([1], 0.1)
    monkeypatch.setattr(try_model, "run_trial", mock.Mock(return_value=verdict(wrong)))
    done = CliRunner().invoke(app, ["try", file])
    assert done.exit_code == 1 and "suffix differs from plain decoding" in done.stdout


def test_mistakes_are_found_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(try_model, "_subject", lambda *given: pytest.fail("something was loaded"))
    for arguments, reason in (
        (["./nothing.gguf"], "no GGUF file './nothing.gguf' for the target"),
        (["embedded", "--draft", "./nothing"], "no model folder './nothing' for the draft"),
        (["qwen-coder"], "the model 'qwen-coder' is not here: `forerun fetch qwen-coder` gets it"),
    ):
        done = CliRunner().invoke(app, ["try", *arguments])
        assert isinstance(done.exception, ValueError) and str(done.exception).startswith(reason)
