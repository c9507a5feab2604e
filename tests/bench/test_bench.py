"""`forerun bench`: processes on tiny random models, and parts whose answers are known by hand."""

import copy
import gzip
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel

from benchmarks.training.tokenizer import END_OF_TEXT
from forerun import ModelOptions
from forerun.api import choose
from forerun.api.load import Decoder
from forerun.bench import measure
from forerun.bench.datasets import (
    Prompt,
    check_datasets,
    front_of,
    read_prompts,
    stdlib_prompts,
    tokenised,
)
from forerun.bench.measure import Loaded, Outcome, Run, bench, decoder_run, group_records
from forerun.bench.models import load_decoders, load_prompts
from forerun.bench.plan import Plan, Runner, parse_methods
from forerun.bench.records import Record, Times, parse, times, total
from forerun.bench.report import results, spread, summary
from forerun.engine.engine import Step
from forerun.engine.stats import Stats, summarise
from forerun.methods import AR, SD, Method, Suffix, method
from forerun.model.causal_lm import CausalLM
from forerun.sampling.params import SamplingParams
from forerun.train.corpus import held_out_prompts, split_of
from tests.support import commands
from tests.support.toys import noisy_copy, refuses, save_lines, save_models, tiny, tiny_tokenizer

Pair = tuple[PreTrainedModel, PreTrainedModel]
FACTS = {"prompts": 1, "cut": 0, "sha256": ""}
PROMPTS = ["def add(a, b):", "the cat sat on", "for i in range(10): print(i) for i in range(10):"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.run("bench", *arguments)


@pytest.fixture(scope="module")
def pair() -> Pair:
    target = tiny("llama", 3, vocab=len(tiny_tokenizer()), context=96)
    return target, noisy_copy(target, 0.02)


@pytest.fixture(scope="module")
def folder(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_models(tmp_path_factory.mktemp("bench"), target=pair[0], draft=pair[1])
    save_lines(
        path / "own.jsonl", [*({"prompt": text} for text in PROMPTS), {"tokens": [5, 6, 7, 5, 6]}]
    )
    return path


def options(folder: Path, *more: str) -> list[str]:
    return [
        "--target",
        str(folder / "target"),
        "--draft",
        str(folder / "draft"),
        "--threads",
        "1",
        *more,
    ]


@pytest.mark.slow
def test_a_run_writes_its_records_and_a_summary(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = options(
        folder, "--methods", "sd", "--methods", "suffix", "--json", "--out", str(out)
    )
    arguments += [
        "--dataset",
        str(folder / "own.jsonl"),
        "--batch",
        "3",
        "--rounds",
        "2",
        "--max-new-tokens",
        "12",
    ]
    arguments += ["--method-arg", "sd.gamma=3"]
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed == json.loads((out / "results.json").read_text())
    methods = printed["methods"]
    assert list(methods) == ["ar", "sd", "suffix"]
    assert all(method["exact_match"] == 1.0 for method in methods.values())
    assert all(method["tokens"] == 2 * 4 * 12 for method in methods.values())
    assert methods["ar"]["speedup"] == methods["ar"]["tau"] == 1.0 < methods["sd"]["tau"]
    assert methods["ar"]["decoding_speedup"] == 1.0 and methods["sd"]["decoding_speedup"] > 0
    assert all(each["decoding_tokens_per_s"] > each["tokens_per_s"] for each in methods.values())
    assert methods["sd"]["draft_forwards"] > 0 and 0 <= methods["sd"]["overhead_share"] <= 1
    assert sum(methods["sd"]["time"].values()) == pytest.approx(1, abs=1e-3)
    assert printed["reference"] == "ar"
    assert (
        set(printed["datasets"]) == {"own.jsonl"}
        and printed["datasets"]["own.jsonl"]["prompts"] == 4
    )
    assert printed["arguments"]["methods"]["sd"] == {"gamma": 3}
    assert printed["arguments"]["target"] == "target"
    assert {"commit", "cpu", "cores", "threads", "gpu", "torch", "transformers"} <= printed[
        "versions"
    ].keys()
    assert printed["date"].endswith(" UTC")

    lines = (out / "records.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 2 * 3  # rounds, batches, methods
    assert set(json.loads(lines[0])) == set(Record.__dataclass_fields__)
    parsed = [parse(line) for line in lines]
    assert {record.group for record in parsed[:3]} == {(0, "own.jsonl", 0)}
    assert parsed[0].prompts == ["1", "2", "3"] and parsed[3].prompts == ["4"]
    names = [record.method for record in parsed]
    assert (
        names[3:6] == names[1:3] + names[:1] and names[6:9] == names[2::-1]
    )  # each is before and after each other
    assert {path.name for path in out.iterdir()} == {"records.jsonl", "results.json", "run.json"}
    assert printed["costs"]["target"] and printed["costs"]["draft"]
    assert all(str(folder) not in path.read_text() for path in out.iterdir())
    refused = run(*arguments)
    assert (refused.returncode, refused.stderr.count("\n")) == (
        2,
        1,
    ) and "holds a run already" in refused.stderr
    assert (
        json.loads(run(*arguments, "--resume").stdout)["methods"] == methods
    )  # nothing is left to measure


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_and_no_other(folder: Path, tmp_path: Path) -> None:
    """A resumed run has the same cells, those before the stop to the letter.

    A run with other arguments, models or versions is refused, and the message names the difference.
    """
    target = shutil.copytree(folder / "target", tmp_path / "target")
    out = tmp_path / "out"
    records = out / "records.jsonl"
    claim = out / "run.json"
    left = [4]
    pair = {"target": str(target), "draft": str(folder / "draft")}
    plan = Plan(
        {"ar": AR(), "sd": SD(2)},
        ("own.jsonl",),
        **pair,
        batch=3,
        rounds=3,
        max_new_tokens=8,
        temperature=1.0,
    )
    files = {"own.jsonl": read_prompts(folder / "own.jsonl")}

    def stop(line: str) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    def refused(message: str, plan: Plan = plan, resume: bool = True) -> None:
        refuses(message, bench, plan, files, out, resume=resume)

    def counts() -> list[tuple[Any, ...]]:
        parsed = map(parse, records.read_text().splitlines())
        return [
            (each.group, each.prompts, each.method, replace(each.stats, seconds=0.0))
            for each in parsed
        ]

    whole = bench(plan, files, out, resume=True)  # a folder without a run: it begins
    cells = counts()
    shutil.rmtree(out)
    with pytest.raises(KeyboardInterrupt):
        bench(plan, files, out, say=stop)
    lines = records.read_text().splitlines(keepends=True)
    assert len(lines) == 4 * 2 and not (out / "results.json").exists()
    records.write_text(
        "".join(lines[:7]) + lines[7][:50]
    )  # killed while it wrote the fourth of six batches
    stored = claim.read_text()
    refused(
        "out holds a run already: give --resume to go on with it, or another --out", resume=False
    )
    refused("out holds another run: seed was 0, not 5", replace(plan, seed=5))
    longer = replace(plan, methods={"ar": AR(), "sd": SD(7)})
    refused(r'out holds another run: methods\.sd was \{"gamma": 2\}, not ', longer)
    for damaged, message in (
        (stored.replace('"versions.torch": "', '"versions.torch": "0.'), r'torch was "0\.'),
        ("{", "out is d"),
    ):
        claim.write_text(damaged)
        refused(message)
    claim.write_text(stored)
    results = bench(plan, files, out, resume=True)
    assert records.read_text().startswith("".join(lines[:6])) and counts() == cells
    assert results["methods"]["sd"]["tau"] == whole["methods"]["sd"]["tau"]
    os.utime(target / "config.json", (2e9, 2e9))
    refused(r"another run: written\.target was ")


def test_methods_of_others_run_beside_ours(folder: Path) -> None:
    """A runner of others is measured like any method.

    It gets the prompts and the target, is warmed up, takes turns and is compared.
    """
    seen: list[Any] = []

    def make(loaded: Loaded) -> Run:
        seen.append((loaded.plan, [prompt.tokens for prompt in loaded.datasets["own.jsonl"]]))
        plain = decoder_run(Decoder(loaded.target.model, prefix_bytes=0), loaded.plan.params())

        def other(
            prompts: Sequence[Sequence[int]], seeds: Sequence[int], warm_up: int | None = None
        ) -> Outcome:
            seen.append(warm_up)
            tokens = [
                [*row[:2], row[2] + 1, *row[3:]] for row in plain(prompts, seeds, warm_up).tokens
            ]
            return Outcome(tokens, 0.5, 9, 0)

        return other

    def runner_of(name: str, ours: Callable[[str], Method]) -> Runner | None:
        return (
            Runner(make, {"draft": ours("sd").gamma}, one_by_one=True) if name == "other" else None
        )  # type: ignore[attr-defined]

    methods = parse_methods(["sd", "other"], ["sd.gamma=3"], None, {}, runner_of)
    refuses("unknown method 'another'", parse_methods, ["another"], [], None, {}, runner_of)
    pair = {"target": str(folder / "target"), "draft": str(folder / "draft")}
    plan = Plan(methods, ("own.jsonl",), max_new_tokens=5, batch=2, **pair)
    report = bench(plan, {"own.jsonl": [Prompt("1", tokens=(5, 6, 7)), Prompt("2", tokens=(7, 8))]})
    assert seen == [(plan, [(5, 6, 7), (7, 8)]), 5, None, None]
    assert report["arguments"]["methods"]["other"] == {"draft": 3}
    other = report["methods"]["other"]
    assert (other["exact_match"], other["tokens"], other["target_forwards"]) == (0.0, 20, 18)
    assert [report["methods"][name]["rows_one_by_one"] for name in ("sd", "other")] == [False, True]
    assert other["time"] is other["alpha"] is None and report["methods"]["sd"]["exact_match"] == 1.0
    refuses(
        "method 'other' needs a draft model",
        Plan,
        {"ar": AR(), "other": Runner(make, needs_draft=True)},
    )


def test_all_methods_decide_by_one_table_of_costs(folder: Path) -> None:
    pair = {"target": str(folder / "target"), "draft": str(folder / "draft")}
    decoders, _ = load_decoders(Plan({"ar": AR(), "sd": SD()}, ("own.jsonl",), **pair), None)
    assert decoders["ar"].costs is decoders["sd"].costs is not None


def test_tuning_names_the_value_of_the_best_median_speedup(folder: Path) -> None:
    arguments = [
        "--tune",
        "sd.gamma=1,4",
        "--dataset",
        str(folder / "own.jsonl"),
        "--max-new-tokens",
        "8",
    ]
    done = run(*options(folder, *arguments, "--rounds", "1"))
    assert done.returncode == 0, done.stderr
    assert "sd.gamma=4" in done.stdout and "best by median speedup" in done.stdout
    plan = Plan(
        parse_methods([], [], "sd.gamma=1,2,4", {}), draft="embedded", tune="sd.gamma=1,2,4"
    )
    for best in (1, 2, 4):
        records = [record("ar", 100, number) for number in range(3)]
        for number, gamma in product(range(3), (1, 2, 4)):
            # The best is the fastest but once, when another is by far: its mean would be better.
            records.append(
                record(
                    f"sd.gamma={gamma}", 150 if gamma == best else 120 if number else 900, number
                )
            )
        assert results(plan, {"d": FACTS}, records)["tuned"] == {"sd": {"gamma": best}}


def test_shipped_settings_are_of_the_embedded_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(choose.FOLDERS, "embedded", tmp_path)
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").touch()
    assert choose.shipped("embedded", "embedded") == {}
    stored = {"greedy": {"sd": {"gamma": 7}}, "sampling": {"sd": {"gamma": 3}}}
    for default, sampling in (({}, None), ({"default": {"sampling": "sd"}}, SD(gamma=3))):
        (tmp_path / "tuned.json").write_text(json.dumps(stored | default))
        assert (
            choose.shipped("embedded", None)
            == choose.shipped("embedded", "embedded")
            == stored | default
        )
        found = choose.resolve("embedded", models=ModelOptions())
        assert (found.method, found.sampling_method, found.costs) == (SD(), sampling, None)
    assert (
        choose.shipped("some/model", "embedded") == choose.shipped("embedded", "some/model") == {}
    )


MISTAKES = {
    "bench --method-arg sd.gamma": "--method-arg takes METHOD.NAME=VALUE, not 'sd.gamma'",
    "bench --method-arg sd.gamma=x": "sd.gamma must be of type int | None, not 'x'",
    "bench --method-arg turbo.n=3": "'turbo' is no method with settings",
    "bench --methods ar --method-arg sd.gamma=3": "method 'sd' is not among --methods",
    "bench --tune sd.gamma=2,three": "sd.gamma must be of type int | None, not 'three'",
    "bench --tune sd.gamma=2 --methods sd": "leave out --methods",
    "bench --dataset mbpp": (
        "unknown dataset 'mbpp'; there are stdlib-test, stdlib-validation and FILE.jsonl"
    ),
    "bench --dataset nothing.jsonl": "cannot read nothing.jsonl",
    "bench --dataset stdlib-test,stdlib-test": "dataset 'stdlib-test' is given twice",
    "bench --dataset vocabulary.jsonl": "prompt '1' has token ids outside 0..",
    "bench --max-new-tokens 2000": "leaves no room for a prompt in the context of",
    "bench --target ./nothing": "no model folder './nothing' for the target",
    "bench --target some/model": "method 'sd' needs a draft model: give --draft",
    "bench --top-p 0.5": "top_p 0.5 needs a temperature above 0",
    "bench --head nothing": "no head in the folder 'nothing'",
    "bench --resume": "--resume needs --out",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes_are_one_line_and_exit_2(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vocabulary.jsonl").write_text('{"tokens": [99999999]}\n')
    monkeypatch.chdir(tmp_path)
    done = commands.run(*command.split())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("forerun: ") and MISTAKES[command] in done.stderr


def test_files_without_prompts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    for content, message in (
        ('{"prompt": "x"}\n{"prompt": \n', "own.jsonl, line 2: not JSON"),
        ('{"tokens": ' + "[" * 100_000 + "\n", "own.jsonl, line 1: not JSON"),
        (
            '{"prompt": 3}\n',
            "own.jsonl, line 1: 'prompt' must be a string that is not empty, not 3",
        ),
        ('{"prompt": "a\\ud800"}\n', "own.jsonl, line 1: 'prompt' has half of a surrogate pair"),
        ('{"tokens": [1, 2.5]}\n', "own.jsonl, line 1: 'tokens' must be a list of token ids"),
        ("\n", "own.jsonl has no prompts"),
    ):
        path.write_text(content)
        refuses(message, read_prompts, path)


def test_public_datasets_are_read_as_published(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as file:
        file.write('{"task_id": "HumanEval/0", "prompt": "def f():"}\n')
    (tmp_path / "gsm8k_test.jsonl").write_text(
        '{"question": "1 + 1?", "answer": "2"}\n{"question": "2?"}\n'
    )
    (tmp_path / "question.jsonl").write_text(
        '{"question_id": 81, "category": "writing", "turns": ["a", "b"]}\n'
    )
    for name, texts in (
        ("HumanEval.jsonl.gz", ["def f():"]),
        ("gsm8k_test.jsonl", ["Question: 1 + 1?\nAnswer:", "Question: 2?\nAnswer:"]),
        ("question.jsonl", ["a"]),
    ):
        check_datasets([name])
        assert read_prompts(tmp_path / name) == [
            Prompt(str(number), text) for number, text in enumerate(texts, 1)
        ]
    assert len(read_prompts(tmp_path / "gsm8k_test.jsonl", 1)) == 1


def test_long_prompts_lose_their_beginning(folder: Path) -> None:
    """But not what a tokenizer puts in front of every text. There is room for the output then."""
    prompt = Prompt("a", tokens=(1, 2, 3, 4))
    for front in ((), (1,)):
        assert tokenised(prompt, None, 4, 10, front=front) == prompt
    for most, front, kept in (
        (3, (), (2, 3, 4)),
        (3, (1,), (1, 3, 4)),
        (3, (9,), (2, 3, 4)),
        (1, (1,), (4,)),
    ):
        assert tokenised(prompt, None, most, 10, front=front) == Prompt("a", tokens=kept, cut=True)
    plan = Plan({"ar": AR()}, ("own.jsonl",), target=str(folder / "target"), max_new_tokens=90)
    ((*prompts,),) = load_prompts(plan, {"own.jsonl": read_prompts(folder / "own.jsonl")})[
        0
    ].values()
    assert max(len(prompt.tokens or ()) for prompt in prompts) == 96 - 90
    assert [prompt.cut for prompt in prompts] == [True, False, True, False]


@pytest.mark.parametrize(
    ("template", "front"), [("E E $A", (0, 0)), ("$A E", ()), ("E $A E", (0,))]
)
def test_what_a_tokenizer_puts_in_front_begins_every_prompt(
    template: str, front: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = partial(held_out_prompts, root=tmp_path)  # the whole one takes half a second to read
    monkeypatch.setattr("forerun.bench.datasets.held_out_prompts", library)
    name = next(name for number in range(999) if split_of(name := f"{number}.py") == "test")
    (tmp_path / name).write_text(PROMPTS[0] + "\n    return a + b" * 9)
    tokenizer = copy.deepcopy(tiny_tokenizer())
    template = template.replace("E", END_OF_TEXT)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[(END_OF_TEXT, 0)]
    )
    assert front_of(tiny_tokenizer()) == () and front_of(tokenizer) == front
    (prompt,) = stdlib_prompts("stdlib-test", tokenizer, 12, 1)
    (bare,) = stdlib_prompts("stdlib-test", tiny_tokenizer(), 12 - len(front), 1)
    assert prompt.tokens == (*front, *(bare.tokens or ()))
    if front:
        refuses(
            "prompt_tokens must be more than",
            stdlib_prompts,
            "stdlib-test",
            tokenizer,
            len(front),
            1,
        )


def test_padded_vocabularies_are_fine(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "draft", tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    (tmp_path / "draft" / "config.json").write_text(
        json.dumps(config | {"vocab_size": config["vocab_size"] + 20})
    )
    files = {"own.jsonl": [Prompt("1", tokens=(5, 6, 7))]}
    pair = {"target": str(folder / "target"), "draft": str(tmp_path / "draft")}
    plan = Plan({"sd": SD()}, ("own.jsonl",), max_new_tokens=8, **pair)
    assert load_prompts(plan, files)[1] is not None  # the tokenizer says that the rest is padding
    for path in (tmp_path / "draft").glob("tokenizer*"):
        path.unlink()
    plan = replace(plan, target=pair["draft"])
    assert load_prompts(plan, files)[1] is None
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config | {"hidden_size": "many"}))
    refuses("cannot load target", load_prompts, plan, files)


def test_stored_settings_give_way_to_given_ones() -> None:
    tuned = {"sd": {"gamma": 7}}
    assert parse_methods([], [], None, tuned) == {"ar": AR(), "sd": SD(7), "suffix": Suffix()}
    assert list(parse_methods(["sd", "ar"], ["sd.gamma=2"], None, tuned).items()) == [
        ("sd", SD(2)),
        ("ar", AR()),
    ]


def record(method: str, rate: float, round: int = 0, batch: int = 0, dataset: str = "d") -> Record:
    stats = Stats(10, 5, 0, 8, 6, 5, 10 / rate, (3, 3), (3, 2))
    return Record(round, dataset, batch, ["a"], method, stats, None, [method != "sd"])


def test_speedups_are_paired() -> None:
    # Each round has a speed of its own: the ratio of the medians would be 1.
    rates = {"ar": [10.0, 100.0, 1000.0], "sd": [20.0, 100.0, 3000.0]}
    records = [
        record(name, rate, number)
        for name, speeds in rates.items()
        for number, rate in enumerate(speeds)
    ]
    figures = summary(records)
    assert figures["sd"]["speedup"] == 2.0 and figures["sd"]["tokens_per_s"] == 100.0
    assert figures["sd"]["exact_match"] == 0.0 and figures["ar"]["exact_match"] == 1.0
    assert figures["sd"]["tokens"] == 30 and figures["sd"]["tau"] == 2.0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((1.4, 3.0, 4.6))
    # Half the tokens in half the time are no speedup.
    short = record("suffix", 10)
    figures = summary(
        [record("ar", 10), replace(short, stats=replace(short.stats, tokens=5, seconds=0.5))]
    )
    assert (
        figures["suffix"]["speedup"] == 1.0
        and figures["suffix"]["tokens_per_s"] == figures["ar"]["tokens_per_s"]
    )
    # Each dataset has its own, and all together have one.
    records = [
        record(*arguments)
        for arguments in (
            ("ar", 10),
            ("ar", 10, 0, 0, "e"),
            ("suffix", 20),
            ("suffix", 40, 0, 0, "e"),
        )
    ]
    both = results(Plan(parse_methods(["suffix"], [], None, {})), {"d": FACTS, "e": FACTS}, records)
    assert [both["datasets"][name]["methods"]["suffix"]["speedup"] for name in "de"] == [2.0, 4.0]
    assert both["methods"]["suffix"]["speedup"] == 3.0 and json.loads(json.dumps(both)) == both


def test_prefill_is_part_of_the_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on in prefill alone: 5 s a prompt."""
    decoder = Decoder(pair[0], draft=pair[1], method=SD(2), guard=False, prefix_bytes=0)
    now, prefill = [0.0], decoder.engine.target.prefill

    def slow(*arguments: Any, **named: Any) -> Any:
        now[0] += 5.0
        return prefill(*arguments, **named)

    monkeypatch.setattr(measure, "perf_counter", lambda: now[0])
    monkeypatch.setattr(decoder.engine.target, "prefill", slow)
    run = decoder_run(decoder, SamplingParams(max_new_tokens=6, ignore_eos=True))
    outcome = run([(3, 4, 5), (6, 7)], [0, 1], None)
    assert (
        outcome.seconds == outcome.stats.seconds == 10.0 and outcome.stats.tokens_per_s == 12 / 10
    )
    steps = [[replace(each, seconds=0.5) for each in row] for row in outcome.steps]
    prompts = [Prompt("a"), Prompt("b")]
    (found,) = group_records((0, "d", 0), prompts, {"ar": replace(outcome, steps=steps)}, None)
    assert found.stats.seconds == 10.0 > found.times.seconds > 0


def test_a_row_is_sampled_by_its_own_seed(pair: Pair) -> None:
    decoder = Decoder(pair[0], draft=pair[1], method=SD(2), guard=False, prefix_bytes=0)
    run = decoder_run(decoder, SamplingParams(max_new_tokens=8, temperature=1.0, ignore_eos=True))
    together = run([[3, 4], [5, 6, 7], [3, 4]], [7, 8, 9], None).tokens
    assert together == [
        run([row], [seed], None).tokens[0]
        for row, seed in (([3, 4], 7), ([5, 6, 7], 8), ([3, 4], 9))
    ]
    assert together[0] != together[2]


def test_a_prompt_that_comes_again_finds_no_phrases(pair: Pair) -> None:
    """Its second run takes as many steps as the first; with the phrases of the first, fewer."""
    decoder = Decoder(pair[0], method=method("suffix"), guard=False, prefix_bytes=0)
    run = decoder_run(decoder, SamplingParams(max_new_tokens=40, ignore_eos=True))
    counts = [run([[3, 4, 5]], [0], None).target_forwards for _ in range(2)]
    again = len(decoder.generate([3, 4, 5], max_new_tokens=40, ignore_eos=True).steps)
    assert counts[0] == counts[1] > again


def test_a_prompt_is_read_again_but_for_its_known_beginning(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder(pair[0], draft=pair[1], method=SD(2), guard=False)
    prompt = list(range(5, 25))
    run = decoder_run(decoder, SamplingParams(max_new_tokens=4, ignore_eos=True))
    prefill = CausalLM.prefill
    read = list[int]()

    def counting(self: CausalLM, *given: Any, **named: Any) -> Any:
        before = self.prefilled
        yield from prefill(self, *given, **named)
        read.append(self.prefilled - before)

    # What a position takes is known from a forward of one token, which is not counted here.
    assert all(
        model is not None and model.position_bytes for model in (decoder.target, decoder.draft)
    )
    monkeypatch.setattr(CausalLM, "prefill", counting)
    outputs = [run([prompt], [0], None, known).tokens for known in ([], [], [12])]
    # Target and draft read all but the last token. The known beginning is read first, all of it by
    # the target, because a step of its own reads the last token.
    assert read == [19, 19, 19, 19, 11, 11, 7, 8] and outputs == outputs[:1] * 3


def test_known_messages_of_a_conversation_are_counted_in_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer()
    template = (
        "{% for each in messages %}<{{ each.role }}>{{ each.content }};{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)  # other tests share the tokenizer
    talk = [
        {"role": role, "content": text}
        for role, text in (("user", "a"), ("assistant", "b"), ("user", "cat"))
    ]
    (prompt,) = read_prompts(save_lines(tmp_path / "talk.jsonl", [{"messages": talk, "known": 2}]))
    found = tokenised(prompt, tokenizer, None, len(tokenizer))
    assert tokenizer.decode(list(found.tokens[: found.known])) == "<user>a;<assistant>b;"
    with pytest.raises(
        ValueError, match="'known' must be a number of messages before the last, not 3"
    ):
        read_prompts(save_lines(tmp_path / "bad.jsonl", [{"messages": talk, "known": 3}]))


def test_one_preemption_does_not_set_where_the_time_goes() -> None:
    plain = (0.2, 0.1, 0.6, 0.1, 0.7), (0.4, 0.2, 1.2, 0.2, 1.4), (0.1, 0.05, 0.3, 50.0, 0.4)
    records = [
        replace(record("ar", 10, number), times=Times(*spent)) for number, spent in enumerate(plain)
    ]
    found = summary(records)["ar"]
    assert found["time"] == {"draft": 0.2, "policy": 0.1, "verify": 0.6, "rest": 0.1}
    assert found["overhead_share"] == 0.3
    records[1] = replace(records[1], times=Times(0.6, 0.1, 0.1, 0.2, 0.4))
    assert sum(summary(records)["ar"]["time"].values()) == pytest.approx(1, abs=2e-4)


def step(tokens: int, tested: int, accepted: int, seconds: float, number: int = 0) -> Step:
    shares = {"draft": 0.2, "policy": 0.1, "verify": 0.5, "forward": 0.6}
    counts = {"drafted": 3, "tested": tested, "accepted": accepted, "draft_forwards": 3}
    spent = {f"{part}_seconds": share * seconds for part, share in shares.items()}
    return Step(
        0, number, 1, (1,) * tokens, ("draft",) * tokens, **counts, **spent, seconds=seconds
    )  # type: ignore[arg-type]


def test_statistics_add_up_and_a_step_of_a_batch_counts_once() -> None:
    steps = [step(3, 3, 2, 1.0), step(1, 1, 0, 1.0), step(4, 3, 3, 2.0)]
    apart = total([summarise(steps[:1], 1.0), summarise(steps[1:], 3.0)])
    assert apart == summarise(steps, 4.0) and apart.acceptance_by_position == (2 / 3, 1.0, 0.5)
    long = [step(1, 1, 0, 1.0, number=7), step(1, 1, 0, 3.0, number=8)]
    spent = times([long[1:], [replace(each, id=1) for each in long]])
    assert spent.seconds == pytest.approx(4.0)
    assert (spent.draft, spent.policy, spent.verify, spent.rest) == pytest.approx(
        (0.8, 0.4, 2.0, 0.8)
    )
    assert spent.overhead_share == pytest.approx(0.4)
