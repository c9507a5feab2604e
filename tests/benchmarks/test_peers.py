"""Peers in a bench.

They are transformers' own methods, our methods on transformers' own forwards, and llama.cpp.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sklearn.metrics
import torch
from transformers import PreTrainedModel

from benchmarks.peers import llama
from benchmarks.peers.bench import with_best
from benchmarks.peers.hf import Generate, load_on_their_forward
from benchmarks.peers.llama import LlamaCpp
from benchmarks.peers.runners import (
    SCHEDULES,
    Peers,
    check_llama,
    checked,
    expanded,
    llama_mode,
    peer_settings,
    takes_rows,
)
from benchmarks.quality.logits import check_logits
from benchmarks.speed.report import markdown, write_report
from forerun.api.load import Decoder
from forerun.backends.stored import is_stored
from forerun.bench import measure
from forerun.bench.datasets import Prompt, read_files
from forerun.bench.measure import Loaded, bench, decoder_run
from forerun.bench.models import load_decoders
from forerun.bench.plan import Plan, parse_methods
from forerun.bench.records import Record
from forerun.bench.report import summary
from forerun.engine.stats import Stats
from forerun.model.causal_lm import CausalLM
from forerun.model.eager import EagerForward
from forerun.sampling.params import SamplingParams
from tests.support import commands
from tests.support.ggufs import small, write
from tests.support.toys import (
    noisy_copy,
    random_head,
    random_layer,
    refuses,
    save_lines,
    save_models,
    tiny,
    tiny_tokenizer,
)

Pair = tuple[PreTrainedModel, PreTrainedModel]
ASSISTED = [f"hf-assisted/{schedule}" for schedule in SCHEDULES]
ROWS = [[5, 6, 7, 5, 6], [9, 8, 7, 6, 5, 4, 9, 8]]


@pytest.fixture
def pair() -> Pair:
    target = tiny("llama", 3, vocab=len(tiny_tokenizer()), context=96)
    return target, noisy_copy(target, 0.02)


@pytest.fixture
def folder(pair: Pair, tmp_path: Path) -> Path:
    """Target, draft, a head and a pre-verifier for them, and prompts."""
    save_models(tmp_path, target=pair[0], draft=pair[1])
    random_head(CausalLM(pair[0])).save_pretrained(tmp_path / "head")
    random_layer(*pair).save_pretrained(tmp_path / "layer")
    save_lines(tmp_path / "own.jsonl", ({"tokens": row} for row in ROWS))
    return tmp_path


def plan_of(folder: Path, *names: str, settings: tuple[str, ...] = (), **options: Any) -> Plan:
    models = {"target": str(folder / "target"), "draft": str(folder / "draft")}
    usual = {"max_new_tokens": 10, "rounds": 1, "datasets": (str(folder / "own.jsonl"),)}
    return checked(
        Plan(parse_methods(names, settings, None, {}, Peers()), **models | usual | options)
    )


def run(plan: Plan, out: Path | None = None) -> dict[str, Any]:
    return bench(plan, read_files(plan.datasets), out)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("hf-ar", {}),
        ("hf-lookup", {"prompt_lookup_num_tokens": 10}),
        ("hf-lookup/6", {"prompt_lookup_num_tokens": 6}),
        ("hf-lookup/6/3", {"prompt_lookup_num_tokens": 6, "max_matching_ngram_size": 3}),
        ("hf-assisted/heuristic", {"num_assistant_tokens_schedule": "heuristic"}),
        ("hf-assisted/6", {"num_assistant_tokens_schedule": "constant", "num_assistant_tokens": 6}),
        (
            "hf-assisted/heuristic/6",
            {"num_assistant_tokens_schedule": "heuristic", "num_assistant_tokens": 6},
        ),
    ],
)
def test_settings_are_in_the_name(name: str, settings: dict[str, Any]) -> None:
    methods = parse_methods([name], [], None, {}, Peers())
    assert list(methods) == ["ar", name] and methods[name].needs_draft == name.startswith(
        "hf-assisted"
    )
    assert peer_settings(name) == settings
    assert takes_rows(name) == (name == "hf-ar")
    assert expanded(["ar", name]) == ["ar", name] and expanded(["hf-assisted", "ar"]) == [
        *ASSISTED,
        "ar",
    ]


def test_settings_that_are_none() -> None:
    for name, message in (
        ("hf-assisted/3/1", "one from 0 to below 1, not 'hf-assisted/3/1'"),
        (
            "hf-lookup/x",
            "hf-lookup/TOKENS/NGRAM takes two numbers of at least 1, not 'hf-lookup/x'",
        ),
        ("hf-ar/3", "unknown method 'hf-ar/3'; there are .* hf-forward/METHOD"),
    ):
        refuses(message, parse_methods, [name], [], None, {}, Peers())


@pytest.mark.slow
def test_the_assistant_drafts_by_its_settings(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Generate(
        pair[0], noisy_copy(pair[0], 0.0), SamplingParams(max_new_tokens=24, ignore_eos=True)
    )
    found = [peers.run(f"hf-assisted/{count}/0")(ROWS[:1], [0], None) for count in (1, 3, 7)]
    # All is accepted: N tokens and one more a forward.
    assert [each.target_forwards for each in found] == [12, 6, 3]
    # Its threshold adapts unless it is 0.
    asked, own = [], sklearn.metrics.roc_curve
    monkeypatch.setattr(sklearn.metrics, "roc_curve", lambda *given: asked.append(1) or own(*given))
    peers = Generate(
        pair[0], noisy_copy(pair[0], 0.05), SamplingParams(max_new_tokens=60, ignore_eos=True)
    )
    for name, adapts in (("hf-assisted/4/0", False), ("hf-assisted/4", True)):
        peers.run(name)(ROWS[:1], [0], None)
        assert bool(asked) == adapts


@pytest.mark.parametrize("name", ["hf-ar", "hf-lookup/4", "hf-assisted/3", *ASSISTED])
def test_peers_sample_with_top_p_and_seeds(name: str, pair: Pair) -> None:
    sampled = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1.5, top_p=0.95)
    run = Generate(*pair, sampled).run(name)
    outputs = [run(ROWS[:1], [seed], None).tokens for seed in (1, 1, 2)]
    assert outputs[0] == outputs[1] != outputs[2]
    narrow = Generate(*pair, replace(sampled, top_p=1e-6)).run(name)(ROWS, [1, 2], None)
    greedy = Generate(*pair, replace(sampled, temperature=0.0, top_p=1.0)).run("hf-ar")(
        ROWS, [0, 0], None
    )
    assert narrow.tokens == greedy.tokens


@pytest.mark.slow
def test_the_command_measures_peers_beside_our_methods(folder: Path) -> None:
    out = folder / "out"
    options = [
        "--target",
        str(folder / "target"),
        "--draft",
        str(folder / "draft"),
        "--threads",
        "1",
        "--json",
    ]
    done = commands.run(
        *options,
        *(
            "--methods",
            "sd,hf-ar",
            "--methods",
            "hf-assisted,hf-lookup",
            "--out",
            str(out),
            "--rounds",
            "1",
        ),
        *("--dataset", str(folder / "own.jsonl"), "--batch", "2", "--max-new-tokens", "8"),
        *("--method-arg", "sd.gamma=3"),
        program="from benchmarks.peers.bench import main, run; run(main)",
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed == json.loads((out / "results.json").read_text())
    methods = printed["methods"]
    assert list(methods) == ["ar", "sd", "hf-ar", *ASSISTED, "hf-lookup", "hf-assisted"]
    assert all(method["exact_match"] == 1.0 for method in methods.values())
    assert all(method["tokens"] == 2 * 8 for method in methods.values())
    assert (
        methods["hf-ar"]["tau"] == 1.0 < methods["hf-assisted"]["tau"]
        and printed["reference"] == "hf-ar"
    )
    best = methods["hf-assisted"]["schedule"]
    assert methods["hf-assisted"]["tokens_per_s"] == max(
        methods[name]["tokens_per_s"] for name in ASSISTED
    )
    assert [methods[name]["rows_one_by_one"] for name in ("sd", "hf-ar", "hf-lookup")] == [
        False,
        False,
        True,
    ]
    pictures = {"speedup.png", "acceptance.png", "time.png"}
    files = {"records.jsonl", "results.json", "run.json", "report.md"}
    assert {path.name for path in out.iterdir()} == pictures | files
    page = (out / "report.md").read_text()
    assert f"| hf-assisted ({best}) |" in page and "best of its settings" in page
    assert (
        "python -m benchmarks.peers.bench --methods ar,sd,hf-ar" in page
        and "--method-arg sd.gamma=3" in page
    )
    assert all(str(folder) not in (out / file).read_text() for file in files)
    wrong = commands.run(
        "--methods", "turbo", program="from benchmarks.peers.bench import main, run; run(main)"
    )
    assert (wrong.returncode, wrong.stderr.count("\n")) == (
        2,
        1,
    ) and "unknown method 'turbo'" in wrong.stderr


def test_an_assistant_needs_the_target_s_vocabulary_and_prompts_that_fit_it(folder: Path) -> None:
    path = folder / "draft" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"max_position_embeddings": 40}))
    assert (
        plan_of(folder, "hf-assisted/3").context == 40
        and plan_of(folder, "sd", "hf-ar").context is None
    )
    path.write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 20}))
    refuses("hf-assisted needs vocabularies of one size", plan_of, folder, "hf-assisted/3")


@pytest.mark.parametrize(
    "name", ["hf-ar", "hf-lookup", "hf-lookup/4/3", "hf-assisted/heuristic/2/0", *ASSISTED]
)
@pytest.mark.parametrize("ignore", [True, False])
def test_peers_say_what_the_target_says(name: str, ignore: bool, pair: Pair) -> None:
    prompts = [list(range(3, 3 + length)) for length in (5, 9, 7)]
    plain = Decoder(pair[0]).generate(prompts, max_new_tokens=20)
    for model in pair:  # both end at a token that does come, and not at once
        model.generation_config.eos_token_id = next(
            t for t in plain[0].tokens[2:] if t not in plain[0].tokens[:2]
        )
    params = SamplingParams(max_new_tokens=20, ignore_eos=ignore)
    wanted = [each.tokens for each in Decoder(pair[0]).generate(prompts, params)]
    outcome = Generate(*pair, params).run(name)(prompts, [0, 1, 2], None)
    assert outcome.tokens == wanted
    assert ignore == all(len(row) == 20 for row in outcome.tokens)
    assert (outcome.draft_forwards > 0) == name.startswith("hf-assisted")
    if name == "hf-ar":
        assert outcome.target_forwards == 3 * max(map(len, wanted))
    else:
        assert 3 <= outcome.target_forwards <= sum(map(len, wanted))


def test_a_schedule_carries_its_own_state_only(pair: Pair) -> None:
    config_before, seen = pair[1].generation_config, {}
    peers = Generate(*pair, SamplingParams(max_new_tokens=24, ignore_eos=True))
    original = peers._generate

    def spy(prompts: Sequence[Sequence[int]], config: Any, schedule: Any) -> list[list[int]]:
        before = schedule.num_assistant_tokens
        output = original(prompts, config, schedule)
        seen.setdefault(schedule.num_assistant_tokens_schedule, []).append(
            (before, schedule.num_assistant_tokens)
        )
        return output

    peers._generate = spy  # type: ignore[method-assign]
    for schedule in ("heuristic", "heuristic_transient", "constant"):
        run = peers.run(f"hf-assisted/{schedule}")
        for warm_up in (8, None, None):
            run([[3, 4, 5]], [0], warm_up)
    assert pair[1].generation_config is config_before and config_before.num_assistant_tokens is None
    warmed, first, second = seen["heuristic"]
    assert warmed[1] is not None and first[0] is None and second[0] == first[1] is not None
    assert seen["heuristic_transient"] == seen["constant"] == [(None, None)] * 3


@pytest.mark.slow
def test_our_methods_run_on_transformers_forwards(folder: Path) -> None:
    names = ["sd", "hf-forward/ar", "hf-forward/sd", "hf-forward/pacer", "hf-forward/lyanna"]
    refuses(
        "method 'hf-forward/sd' needs a draft model", plan_of, folder, "hf-forward/sd", draft=None
    )
    refuses(
        "method 'hf-forward/pacer' needs a pre-verifier", run, plan_of(folder, "hf-forward/pacer")
    )
    layers = {"head": (str(folder / "head"),), "pre_verifier": folder / "layer"}
    plan = plan_of(folder, *names, settings=("sd.gamma=3",), draft_weights="float32", **layers)
    results = run(plan, folder / "out")
    write_report(folder / "out")
    assert list(results["arguments"]["methods"]) == ["ar", *names]
    assert results["arguments"]["methods"]["hf-forward/sd"] == {"gamma": 3}
    methods = results["methods"]
    assert {each["exact_match"] for each in methods.values()} == {1.0}
    assert methods["hf-forward/sd"]["tau"] == methods["sd"]["tau"] > 1
    assert methods["hf-forward/sd"]["draft_forwards"] == methods["sd"]["draft_forwards"]
    page = (folder / "out" / "report.md").read_text()
    assert all(f"| {name} |" in page for name in ("ar", *names))
    assert "`hf-forward/METHOD` is our method on transformers' own forwards" in page
    assert "`hf-` methods" not in page


def test_their_forwards_are_untouched(folder: Path) -> None:
    plan = plan_of(folder, "sd", "suffix")
    _, target = load_decoders(plan, None)
    loaded = load_on_their_forward(plan, None)
    for decoder in loaded.values():
        assert (
            isinstance(decoder.target.backend, EagerForward)
            and decoder.target.model is not target.model
        )
    assert loaded["suffix"].draft is None is not loaded["sd"].draft
    assert isinstance(loaded["sd"].draft.backend, EagerForward) and not is_stored(
        loaded["sd"].draft.model
    )


def test_a_file_in_few_bits_is_in_float32_on_their_forward(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    write(path, small(), "Q4_1")
    save_lines(tmp_path / "own.jsonl", [{"tokens": ROWS[0]}])
    names = ["suffix", "hf-forward/ar", "hf-forward/suffix"]
    plan = plan_of(tmp_path, *names, target=str(path), draft=None)
    results = run(plan)
    theirs = load_on_their_forward(plan_of(tmp_path, "ar", target=str(path), draft=None), None)[
        "ar"
    ].target
    assert not is_stored(theirs.model) and str(theirs.dtype) == "torch.float32"
    methods = results["methods"]
    assert methods["suffix"]["exact_match"] == 1.0
    assert all(methods[name]["exact_match"] is not None for name in names)  # rounding may differ


def test_the_best_of_several_settings_has_a_row() -> None:
    def record(name: str, rate: float, number: int) -> Record:
        stats = Stats(10, 5, 0, 8, 6, 5, 10 / rate, (3, 3), (3, 2))
        return Record(number, "d", 0, ["a"], name, stats, None, [True])

    rates = {
        "ar": [10, 100, 10],
        "sd": [20, 100, 40],
        "hf-assisted/3": [30, 50, 20],
        "hf-assisted/6": [5, 100, 80],
    }
    records = [
        record(name, rate, number)
        for name, values in rates.items()
        for number, rate in enumerate(values)
    ]
    found = with_best({"methods": summary(records), "datasets": {}})["methods"]
    assert found["hf-assisted"]["schedule"] == "6" and found["hf-assisted"]["tokens_per_s"] == 80.0
    assert found["sd"]["speedup"] == 2.0
    one = summary([record for record in records if record.method != "hf-assisted/6"])
    assert "hf-assisted" not in with_best({"methods": one, "datasets": {}})["methods"]


def test_results_say_what_they_were_measured_with(folder: Path) -> None:
    plan = plan_of(folder, "suffix")
    results = run(plan)
    compared = check_logits(plan, {str(folder / "own.jsonl"): []})
    for each in (results, compared):
        assert {"arguments", "versions", "date"} <= each.keys() and each["date"].endswith(" UTC")
    assert compared["check_logits"].keys() == {"ar", "suffix"}
    results["versions"]["scikit-learn"], results["methods"]["hf-assisted/3"] = (
        None,
        results["methods"]["ar"],
    )
    assert (
        "Without scikit-learn the threshold of transformers' assistant does not adapt"
        in markdown(results, [])
    )


# llama.cpp: what it is asked for, with a stand-in; what it decodes, if node-llama-cpp is installed.

ROOT = Path(llama.__file__).parents[2]
# Decodes by a table, answers with what it was asked, and saves a forward where it drafts.
STANDIN = """
import readline from "node:readline";
const table = [3, 5, 4, 6, 2, 4, 1, 0];
let begins = true;
for await (const line of readline.createInterface({input: process.stdin})) {
    const asked = JSON.parse(line), found = [];
    if (begins) { begins = false; console.log(JSON.stringify({processor: line})); continue; }
    if (asked.tokens.includes(7)) { console.log(JSON.stringify({error: "no room"})); continue; }
    if (asked.tokens.includes(0)) process.exit(1);
    for (let last = asked.tokens.at(-1); found.length < asked.most && !asked.ends.includes(last);)
        found.push(last = table[last]);
    const drafts = Object.keys(asked.mode).length;
    const forwards = found.length - drafts, first = 0.1 + asked.known;
    const seconds = asked.sampling.temperature;
    console.log(JSON.stringify({tokens: found, seconds, forwards, first}));
}
"""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LlamaCpp]:
    if shutil.which("node") is None:
        pytest.skip("there is no node")
    script = tmp_path / "standin.mjs"
    script.write_text(STANDIN)
    monkeypatch.setattr(llama, "SCRIPT", script)
    started = LlamaCpp(
        {"target": "small.gguf"}, SamplingParams(max_new_tokens=6, temperature=0.5), {4}
    )
    yield started
    started.process.kill()
    started.process.wait()


def test_it_decodes_to_the_end_token_with_its_own_drafts(peer: LlamaCpp) -> None:
    assert "small.gguf" in peer.processor
    plain, drafting = (
        peer.run(name)([[3], [1, 3]], [0, 1], None) for name in ("llama-cpp", "llama-cpp-draft/2")
    )
    assert plain.tokens == drafting.tokens == [[6, 1, 5, 4], [6, 1, 5, 4]]
    assert (plain.target_forwards, drafting.target_forwards, plain.seconds) == (8, 6, 1.0)
    assert peer.run("llama-cpp")([[3]], [0], 2).tokens == [[6, 1]]
    assert plain.decoding == pytest.approx(0.8) and plain.decoding_tokens_per_s == pytest.approx(
        6 / 0.8
    )
    assert peer.run("llama-cpp")([[3]], [0], None, [0.2]).decoding == pytest.approx(0.2)


def test_its_errors_are_one_line(peer: LlamaCpp, monkeypatch: pytest.MonkeyPatch) -> None:
    for token, message in (
        (7, r"llama\.cpp cannot decode: no room"),
        (0, "ended: `npm install node-llama-cpp`"),
    ):
        refuses(message, peer.run("llama-cpp"), [[token]], [0], None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    refuses("there is no node", LlamaCpp, {}, SamplingParams(), set())


def test_names_say_how_it_drafts(tmp_path: Path) -> None:
    assert llama_mode("llama-cpp") == {}
    assert llama_mode("llama-cpp-draft/4/0.5") == {"draft": {"maxTokens": 4, "minConfidence": 0.5}}
    lookup = {"predictionLength": {"min": 1, "max": 5}, "patternLength": {"min": 1, "max": 2}}
    assert llama_mode("llama-cpp-lookup/5/2") == {"lookup": lookup}
    for name in (
        "llama-cpp-draft/0",
        "llama-cpp-draft/1/2",
        "llama-cpp-lookup/0",
        "llama-cpp-lookup/1/2/3",
    ):
        refuses("takes", peer_settings, name)
    path = str(write(tmp_path / "small.gguf", small()))
    check_llama("llama-cpp-draft", path, path, 1, None)
    for target, draft, batch, device, message in (
        (path, None, 1, None, "needs a GGUF file as --draft"),
        ("embedded", path, 1, None, "needs a GGUF file as --target"),
        (path, path, 2, None, "one prompt at a time"),
        (path, path, 1, "cuda", "runs on the CPU"),
    ):
        refuses(message, check_llama, "llama-cpp-draft", target, draft, batch, device)


def test_it_is_a_runner_of_a_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process serves all methods.

    `tests/bench/test_bench.py` checks what is counted of a runner's outputs.
    """
    started: list[str] = []

    def load_llama(loaded: Loaded) -> Any:
        started.append(loaded.plan.target)
        return SimpleNamespace(
            run=lambda name: decoder_run(Decoder(loaded.target.model), loaded.plan.params())
        )

    monkeypatch.setattr(llama, "load_llama", load_llama)
    monkeypatch.setattr(
        measure, "load_prompts", lambda *_: ({"own": [Prompt("a", tokens=(5, 6, 7))]}, None)
    )
    names = ["llama-cpp", "llama-cpp-lookup"]
    path = str(write(tmp_path / "small.gguf", small()))
    methods = parse_methods(names, [], None, {}, Peers())
    found = measure.bench(Plan(methods, target=path, max_new_tokens=6, weights="float32"), {})
    assert started == [path] and {found["methods"][name]["exact_match"] for name in names} == {1.0}


@pytest.mark.skipif(
    not (ROOT / "node_modules/node-llama-cpp").is_dir(), reason="node-llama-cpp is not installed"
)
def test_the_real_one_decodes_what_the_model_does(tmp_path: Path) -> None:
    model = small()
    prompt = [5, 6, 7, 5, 6]
    path = str(write(tmp_path / "small.gguf", model, "F32"))
    models = {"target": path, "draft": path, "length": 256, "threads": 1}
    greedy = LlamaCpp(models, SamplingParams(max_new_tokens=24), set())
    for name in ("llama-cpp", "llama-cpp-lookup", "llama-cpp-draft/3"):
        (tokens,) = greedy.run(name)([prompt], [0], None).tokens
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[
                0, len(prompt) - 1 : -1
            ]
        below = logits.max(-1).values - logits[range(24), tokens]
        assert below.max() < 0.05  # its cache is float16
    greedy.ends = {tokens[5]}
    assert greedy.run("llama-cpp")([prompt], [0], None).tokens == [
        tokens[: tokens.index(tokens[5]) + 1]
    ]
    sampled = LlamaCpp(models, SamplingParams(max_new_tokens=24, temperature=1.0), set()).run(
        "llama-cpp"
    )
    first, again, other = (sampled([prompt], [seed], None).tokens for seed in (1, 1, 2))
    assert first == again != other
