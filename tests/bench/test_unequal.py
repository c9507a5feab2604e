"""What `forerun bench` keeps of an output that is not that of plain decoding."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.api.load import Decoder
from forerun.bench import unequal
from forerun.bench.datasets import Prompt
from forerun.bench.measure import Loaded, Outcome, Run, bench, decoder_run
from forerun.bench.plan import Plan, Runner
from forerun.bench.unequal import Anew, Side, first_difference, first_unlike, judged
from forerun.cli.bench import tell
from forerun.methods import AR, method
from tests.support.families import tiny
from tests.support.toys import save_models

PROMPTS = [Prompt("a", tokens=tuple(range(3, 40))), Prompt("b", tokens=(9, 8, 7, 9, 8))]
NEW, AT = 12, 5  # tokens of an output, and the one that is wrong
Rows = Sequence[Sequence[int]]
Change = Callable[[Outcome], Outcome]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("unequal"), target=tiny("llama"))


def fake(name: str, change: Change, prompt: Prompt = PROMPTS[0]) -> Runner:
    """A method of ours whose outcome is changed the first time that it decodes the prompt."""

    def make(loaded: Loaded) -> Run:
        decoder = Decoder(loaded.target, method=method(name), guard=False, prefix_bytes=0)
        run = decoder_run(decoder, loaded.plan.params())
        left = [change]

        def changed(prompts: Rows, seeds: Sequence[int], warm_up: int | None = None) -> Outcome:
            outcome = run(prompts, seeds, warm_up)
            if warm_up is None and tuple(prompts[0]) == prompt.tokens and left:
                return left.pop()(outcome)
            return outcome

        return changed

    return Runner(make)


def say_wrong(outcome: Outcome) -> Outcome:
    """Say another token at AT, and the next ones as before."""
    tokens = [*outcome.tokens[0]]
    tokens[AT] = (tokens[AT] + 1) % 130
    return replace(outcome, tokens=[tokens, *outcome.tokens[1:]])


def spoil_keys(outcome: Outcome) -> Outcome:
    """Say a wrong token as well, after a key of position 4 in the second layer was damaged."""
    assert outcome.cache is not None
    with torch.inference_mode():  # as the run that made them
        outcome.cache.layers[1].keys[0, 1, 4, 3] += 1
    return say_wrong(outcome)


def measured(
    folder: Path, out: Path | None, methods: dict[str, Any], **more: Any
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the lines on the console and what the files hold."""
    more |= {"target": str(folder / "target"), "max_new_tokens": NEW, "rounds": 2}
    plan = Plan(methods, ("d.jsonl",), **more)
    lines: list[str] = []
    bench(plan, {"d.jsonl": PROMPTS}, out, tell=lines.append)
    files = sorted((out / "unequal").iterdir()) if out is not None and lines else []
    return lines, [json.loads(path.read_text()) for path in files]


def test_a_wrong_token_of_a_method_is_explained(folder: Path, tmp_path: Path) -> None:
    methods = {"ar": AR(), "suffix": fake("suffix", say_wrong)}
    (line,), (report,) = measured(folder, tmp_path, methods)
    path = tmp_path / "unequal" / "0-d.jsonl-0-a-suffix.json"
    start = "unequal: d.jsonl, prompt a, round 1: suffix differs from ar at output token 5: "
    plain, wrong = report["runs"]["ar"], report["runs"]["suffix"]
    greedy = plain["output"]["tokens"][AT]
    assert line == f"{start}suffix was wrong, as token {greedy} is the greedy one; see {path}"
    assert report["wrong"] == ["suffix"]
    assert (report["first_difference"], report["prompt_id"], report["round"]) == (AT, "a", 0)
    assert report["prompt"]["tokens"] == list(PROMPTS[0].tokens or ())
    assert wrong["output"]["tokens"][AT] == (greedy + 1) % 130
    said = plain["output"]["tokens"][: AT + 1]
    assert [step["tokens"] for step in plain["steps"]] == [[token] for token in said]
    entries = [run["keys_and_values"] for run in (plain, wrong, *report["anew"].values())]
    assert len({(entry["positions"], entry["keys"], entry["values"]) for entry in entries}) == 1
    assert entries[0]["positions"] == 37 + AT
    assert entries[0]["first_unlike"] == {"one_by_one": None, "block": None}
    anew = report["anew"]["one_by_one"]
    assert anew == report["anew"]["block"]
    assert anew["greedy"] == greedy
    assert anew["logits"][str(greedy)] == max(anew["logits"].values())
    assert str(wrong["output"]["tokens"][AT]) in anew["logits"]


def test_plain_decoding_may_be_what_was_wrong(folder: Path, tmp_path: Path) -> None:
    methods = {"ar": fake("ar", spoil_keys), "suffix": method("suffix")}
    (line,), (report,) = measured(folder, tmp_path, methods)
    assert "ar was wrong, as token" in line
    assert report["wrong"] == ["ar"]
    place = {"position": 4, "layer": 1, "part": "keys"}
    unlike = {name: run["keys_and_values"]["first_unlike"] for name, run in report["runs"].items()}
    assert unlike["ar"] == {"one_by_one": place, "block": place}
    assert unlike["suffix"] == {"one_by_one": None, "block": None}


def test_without_a_folder_the_line_says_how_to_keep_it(folder: Path) -> None:
    (line,), _ = measured(folder, None, {"ar": AR(), "suffix": fake("suffix", say_wrong)})
    assert line.endswith("is the greedy one; --out keeps what explains it")


def test_equal_and_sampled_outputs_leave_no_line(folder: Path, tmp_path: Path) -> None:
    methods = {"ar": AR(), "suffix": method("suffix")}
    assert measured(folder, tmp_path / "greedy", methods) == ([], [])
    wrong = {"ar": AR(), "suffix": fake("suffix", say_wrong)}
    assert measured(folder, tmp_path / "sampled", wrong, temperature=1.0) == ([], [])
    assert not (tmp_path / "greedy" / "unequal").exists()


def test_rows_of_a_batch_are_explained_without_their_keys(folder: Path, tmp_path: Path) -> None:
    methods = {"ar": AR(), "suffix": fake("suffix", say_wrong)}
    _, (found,) = measured(folder, tmp_path, methods, batch=2)
    assert found["wrong"] == ["suffix"]
    assert found["runs"]["suffix"]["keys_and_values"] is None


def test_files_are_few(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"MAX_FILES": 1, "MAX_TOKENS": 4, "MAX_STEPS": 2}
    limits |= {"ONE_BY_ONE_TOKENS": 3, "BLOCK_TOKENS": 2}
    for name, most in limits.items():
        monkeypatch.setattr(unequal, name, most)
    methods = {"ar": AR(), "suffix": fake("suffix", say_wrong), "other": fake("ar", say_wrong)}
    every = methods | {"late": fake("ar", say_wrong, PROMPTS[1])}
    lines, files = measured(folder, tmp_path, every)
    assert len(lines) == len(files) == 3
    assert all(line.endswith(" are not explained") for line in lines)
    output = files[0]["runs"]["ar"]["output"]
    assert (output["count"], output["from"], len(output["tokens"])) == (NEW, 3, 4)
    assert len(files[0]["runs"]["ar"]["steps"]) == 2
    assert files[0]["prompt"]["from"] == len(PROMPTS[0].tokens or ()) - 4
    # What is not run one by one, or in the last block, is read as a prompt.
    assert all(found["anew"]["one_by_one"] == found["anew"]["block"] for found in files)


def test_what_cannot_be_computed_anew_ends_no_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any, **named: Any) -> Anew:
        raise MemoryError("no memory for a forward")

    monkeypatch.setattr(unequal, "computed_anew", fail)
    methods = {"ar": AR(), "suffix": fake("suffix", say_wrong)}
    (line,), (report,) = measured(folder, tmp_path, methods)
    assert "the logits could not be computed anew: MemoryError" in line
    assert (report["wrong"], report["anew"]) == (None, {})
    assert report["runs"]["ar"]["keys_and_values"]["first_unlike"] == {}


def test_the_line_stays_on_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    tell("unequal: a line")
    assert capsys.readouterr().err == "unequal: a line\n"


def side(name: str, *tokens: int, exact: Any = "bitwise") -> Side:
    return Side(name, list(tokens), exact=exact)


def anew(*logits: float) -> Anew:
    return Anew(torch.tensor(logits), [])


def test_verdicts_whose_answers_are_known() -> None:
    new = {"one_by_one": anew(0.0, 2.0, 1.0), "block": anew(0.0, 2.0, 1.0)}
    assert judged((side("ar", 1), side("x", 2)), 0, new, False).wrong == ("x",)
    assert judged((side("ar", 2), side("x", 1)), 0, new, False).wrong == ("ar",)
    both = judged((side("ar", 2), side("x", 0)), 0, new, False)
    assert (both.wrong, both.text) == (("ar", "x"), "both were wrong, as token 1 is the greedy one")
    # An output that ends too early, and one that goes on after its end.
    assert judged((side("ar", 1), side("x")), 0, new, False).wrong == ("x",)
    assert judged((side("ar"), side("x", 1)), 0, new, True).wrong == ("x",)
    # Kernels that round differently may disagree about two tokens that are nearly equal.
    near = {"one_by_one": anew(0.0, 2.0, 1.9999), "block": anew(0.0, 1.9999, 2.0)}
    rounded = side("ar", 1, exact="rounding"), side("x", 2, exact="rounding")
    assert judged(rounded, 0, near, False).wrong == ()
    assert judged(rounded, 0, new, False).wrong == ("x",)
    unknown = judged((side("ar", 1), side("x", 2)), 0, near, False)
    assert unknown.wrong is None
    assert "logits computed anew differ by 0.0001" in unknown.text


def test_first_differences_are_found_bit_by_bit() -> None:
    others = [3], [1, 3], [1], [1, 2, 3]
    assert [first_difference([1, 2], other) for other in others] == [0, 1, 1, 2]
    keys = torch.zeros(2, 6, 4, dtype=torch.float16)
    other = keys.clone()
    other[1, 5, 0] = -0.0  # equal as a number, but not in its bits
    assert first_unlike([None, (keys, keys)], [None, (keys, other)]) == {
        "position": 5,
        "layer": 1,
        "part": "values",
    }
    assert first_unlike([(keys, keys)], [(keys[:, :5], other[:, :5])]) is None
