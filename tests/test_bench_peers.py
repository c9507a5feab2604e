"""Others beside us in a bench: how transformers' methods are set, and our methods on transformers' own forwards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sklearn.metrics
from ggufs import small, write
from toys import BASELINES, noisy_copy, random_head, random_layer, tiny, tiny_tokenizer
from transformers import PreTrainedModel

from forerun.bench.choose import own_name, parse_methods, peer_settings, takes_rows
from forerun.bench.decoders import load_decoders, load_on_their_forward
from forerun.bench.logits import check_logits
from forerun.bench.pages import markdown
from forerun.bench.peers import Peers
from forerun.bench.plan import Plan
from forerun.bench.records import Record
from forerun.bench.report import provenance, summary
from forerun.bench.session import bench
from forerun.bench.simulate import read_run
from forerun.metrics import Stats
from forerun.model import CausalLM
from forerun.params import SamplingParams
from forerun.runtime.stored import is_stored

ROWS = [[5, 6, 7, 5, 6], [9, 8, 7, 6, 5, 4, 9, 8]]


@pytest.fixture
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny("llama", 3, vocab=len(tiny_tokenizer()), context=96)
    return target, noisy_copy(target, 0.02)


@pytest.fixture
def folder(pair: tuple[PreTrainedModel, PreTrainedModel], tmp_path: Path) -> Path:
    """Target, draft, a head and a pre-verifier for them, and prompts."""
    for name, model in zip(("target", "draft"), pair, strict=True):
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    random_head(CausalLM(pair[0])).save_pretrained(tmp_path / "head")
    random_layer(*pair).save_pretrained(tmp_path / "layer")
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({"tokens": row}) + "\n" for row in ROWS))
    return tmp_path


def plan_of(folder: Path, *names: str, settings: tuple[str, ...] = (), **options: Any) -> Plan:
    models = {"target": str(folder / "target"), "draft": str(folder / "draft")}
    usual = {"max_new_tokens": 10, "rounds": 1, "datasets": (str(folder / "own.jsonl"),)}
    return Plan(parse_methods(names, settings, None, {}), **models | usual | options)


def run(plan: Plan, out: Path | None = None) -> dict[str, Any]:
    from forerun.bench.datasets import read_files

    return bench(plan, read_files(plan.datasets, None, None), out)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("hf-ar", {}),
        ("hf-lookup", {"prompt_lookup_num_tokens": 10}),
        ("hf-lookup/6", {"prompt_lookup_num_tokens": 6}),
        ("hf-lookup/6/3", {"prompt_lookup_num_tokens": 6, "max_matching_ngram_size": 3}),
        ("hf-assisted/heuristic", {"num_assistant_tokens_schedule": "heuristic"}),
        ("hf-assisted/6", {"num_assistant_tokens_schedule": "constant", "num_assistant_tokens": 6}),
        ("hf-assisted/heuristic/6", {"num_assistant_tokens_schedule": "heuristic", "num_assistant_tokens": 6}),
        (
            "hf-assisted/6/0.25",
            {
                "num_assistant_tokens_schedule": "constant",
                "num_assistant_tokens": 6,
                "assistant_confidence_threshold": 0.25,
            },
        ),
    ],
)
def test_settings_are_in_the_name(name: str, settings: dict[str, Any]) -> None:
    assert list(parse_methods([name], [], None, {})) == ["ar", name]
    assert peer_settings(name) == settings
    assert takes_rows(name) == (name == "hf-ar")


def test_without_settings_it_is_every_schedule() -> None:
    schedules = ["hf-assisted/heuristic", "hf-assisted/heuristic_transient", "hf-assisted/constant"]
    assert list(parse_methods(["hf-assisted"], [], None, {})) == ["ar", *schedules]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf-assisted/", r"THRESHOLD takes one of heuristic, .*, not 'hf-assisted/'"),
        ("hf-assisted/0", "a number of at least 1"),
        ("hf-assisted/linear/3", "takes one of heuristic, heuristic_transient, constant, a number"),
        ("hf-assisted/3/1", "one from 0 to below 1, not 'hf-assisted/3/1'"),
        ("hf-assisted/3/0.5/4", "not 'hf-assisted/3/0.5/4'"),
        ("hf-lookup/x", "hf-lookup/TOKENS/NGRAM takes two numbers of at least 1, not 'hf-lookup/x'"),
        ("hf-ar/3", "unknown method 'hf-ar/3'; there are .* hf-forward/METHOD"),
        ("hf-forward", "unknown method 'hf-forward'"),
        ("hf-forward/hf-ar", "unknown method 'hf-forward/hf-ar'"),
    ],
)
def test_settings_that_are_none(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_methods([name], [], None, {})


@pytest.mark.parametrize("name", ["hf-assisted/3", "hf-assisted/heuristic/2/0", "hf-lookup/4/3"])
def test_peers_with_settings_say_what_the_target_says(name: str, pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    peers = Peers(*pair, SamplingParams(max_new_tokens=20, ignore_eos=True))
    plain = peers.run("hf-ar")(ROWS, [0, 1], None)
    assert peers.run(name)(ROWS, [0, 1], None).tokens == plain.tokens


def test_the_assistant_drafts_as_many_tokens_as_it_is_told(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    peers = Peers(pair[0], noisy_copy(pair[0], 0.0), SamplingParams(max_new_tokens=24, ignore_eos=True))
    found = [peers.run(f"hf-assisted/{count}/0")(ROWS[:1], [0], None) for count in (1, 3, 7)]
    # All is accepted: so many tokens and one more a forward.
    assert [each.target_forwards for each in found] == [12, 6, 3]


def test_its_threshold_adapts_unless_it_is_0(
    pair: tuple[PreTrainedModel, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, own = [], sklearn.metrics.roc_curve

    def roc_curve(*arguments: Any) -> Any:
        asked.append(len(arguments[0]))
        return own(*arguments)

    monkeypatch.setattr(sklearn.metrics, "roc_curve", roc_curve)
    peers = Peers(pair[0], noisy_copy(pair[0], 0.05), SamplingParams(max_new_tokens=60, ignore_eos=True))
    peers.run("hf-assisted/4/0")(ROWS[:1], [0], None)
    assert asked == []
    peers.run("hf-assisted/4")(ROWS[:1], [0], None)
    assert asked


@pytest.mark.parametrize("name", ["hf-ar", "hf-lookup/4", "hf-assisted/3", "hf-assisted/heuristic"])
def test_peers_sample_with_top_p_and_seeds(name: str, pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    sampled = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1.5, top_p=0.95)
    run = Peers(*pair, sampled).run(name)
    outputs = [run(ROWS[:1], [seed], None).tokens for seed in (1, 1, 2)]
    assert outputs[0] == outputs[1] != outputs[2]
    narrow = Peers(*pair, replace(sampled, top_p=1e-6)).run(name)(ROWS, [1, 2], None)
    assert narrow.tokens == Peers(*pair, replace(sampled, temperature=0.0, top_p=1.0)).run("hf-ar")(ROWS, [0, 0]).tokens


def test_our_methods_run_on_transformers_forwards(folder: Path) -> None:
    names = [
        "sd",
        "hf-forward/ar",
        "hf-forward/sd",
        "hf-forward/pacer",
        "hf-forward/lyanna",
        f"hf-forward/{BASELINES['oracle']}",
    ]
    layers = {"head": (str(folder / "head"),), "pre_verifier": (str(folder / "layer"),)}
    plan = plan_of(folder, *names, settings=("sd.gamma=3",), draft_weights="float32", **layers)
    found = run(plan, folder / "out")
    assert list(found["arguments"]["methods"]) == ["ar", *names]
    assert found["arguments"]["methods"]["hf-forward/sd"] == {"gamma": 3, "verification": "block"}
    methods = found["methods"]
    assert {each["exact_match"] for each in methods.values()} == {1.0}
    assert methods["hf-forward/sd"]["tau"] == methods["sd"]["tau"] > 1
    assert methods["hf-forward/sd"]["draft_forwards"] == methods["sd"]["draft_forwards"]
    page = (folder / "out" / "report.md").read_text()
    assert all(f"| {name} |" in page for name in ("ar", *names))
    assert "`hf-forward/METHOD` is our method on transformers' own forwards" in page
    assert "`hf-` methods" not in page
    assert set(read_run(folder / "out").methods) == {"ar", "sd"}  # what steps cost is another thing on theirs


def test_their_forwards_are_untouched(folder: Path) -> None:
    plan = plan_of(folder, "sd", "hf-forward/sd", "hf-forward/suffix")
    assert own_name("hf-forward/sd") == "sd"
    ours, target, _ = load_decoders(plan, None, None)
    theirs = load_on_their_forward(plan, None)
    assert set(ours) == {"ar", "sd"} and set(theirs) == {"hf-forward/sd", "hf-forward/suffix"}
    for decoder in theirs.values():
        assert decoder.target._forward is None and decoder.target.model is not target.model
    assert theirs["hf-forward/sd"].draft is not None and theirs["hf-forward/suffix"].draft is None
    assert theirs["hf-forward/sd"].draft._forward is None and not is_stored(theirs["hf-forward/sd"].draft.model)
    assert load_on_their_forward(plan_of(folder, "sd"), None) == {}


def test_a_file_in_few_bits_is_in_float32_on_their_forward(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    write(path, small(), "Q4_1")
    (tmp_path / "own.jsonl").write_text(json.dumps({"tokens": [5, 6, 7, 5, 6]}) + "\n")
    names = ["suffix", "hf-forward/ar", "hf-forward/suffix"]
    plan = plan_of(tmp_path, *names, target=str(path), draft=None)
    found = run(plan)
    theirs = load_on_their_forward(plan, None)["hf-forward/ar"].target
    assert not is_stored(theirs.model) and str(theirs.dtype) == "torch.float32"
    methods = found["methods"]
    assert methods["suffix"]["exact_match"] == 1.0
    for name in names[1:]:  # rounding may differ, and then it is said how nearly the target chose otherwise
        differences = methods[name]["differences"]
        assert differences is None or differences["margin_max"] < 0.1


def test_what_their_forward_is_not_for(folder: Path) -> None:
    with pytest.raises(ValueError, match="'hf-forward/sd' is not for --clients and --rate"):
        plan_of(folder, "hf-forward/sd", clients=(2,))
    with pytest.raises(ValueError, match="'hf-forward/sd' cannot be measured in another shape"):
        plan_of(folder, "hf-forward/sd", target_shape="llama-2-7b")
    with pytest.raises(ValueError, match="method 'hf-forward/sd' needs a draft model"):
        plan_of(folder, "hf-forward/sd", draft=None)
    with pytest.raises(ValueError, match="method 'hf-forward/pacer' needs a pre-verifier"):
        plan_of(folder, "hf-forward/pacer")


def test_the_best_of_several_settings_has_a_row_and_ratios_are_to_every_method() -> None:
    def record(name: str, rate: float, number: int) -> Record:
        stats = Stats(10, 5, 0, 8, 6, 5, 10 / rate, (3, 3), (3, 2))
        return Record(number, "d", 0, ["a"], name, stats, None, None, None, [True], [])

    rates = {"ar": [10, 100, 10], "sd": [20, 100, 40], "hf-assisted/3": [30, 50, 20], "hf-assisted/6": [5, 100, 80]}
    records = [record(name, rate, number) for name, each in rates.items() for number, rate in enumerate(each)]
    found = summary(records, {})
    assert found["hf-assisted"]["schedule"] == "6" and found["hf-assisted"]["tokens_per_s"] == 80.0
    assert found["sd"]["over"] == {"ar": 2.0, "sd": 1.0, "hf-assisted/3": 2.0, "hf-assisted/6": 1.0}
    assert all(each["over"]["ar"] == each["speedup"] for each in found.values())
    assert "hf-assisted" not in summary([each for each in records if each.method != "hf-assisted/6"], {})


def test_results_say_what_they_were_measured_with(folder: Path) -> None:
    plan = plan_of(folder, "suffix")
    found = run(plan)
    checked = check_logits(plan, {str(folder / "own.jsonl"): []})
    for each in (found, checked, provenance({})):
        assert {"arguments", "versions", "date"} <= each.keys() and each["date"].endswith(" UTC")
        assert {"commit", "cpu", "cores", "threads", "gpu", "torch", "transformers"} <= each["versions"].keys()
    found["versions"]["scikit-learn"], found["methods"]["hf-assisted/3"] = None, found["methods"]["ar"]
    assert "Without scikit-learn the threshold of transformers' assistant stays" in markdown(found, "", [])
