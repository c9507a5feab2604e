"""llama.cpp as a peer: what it is asked for, with a stand-in; what it says, where llama-cpp-python is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from ggufs import small, write
from toys import tiny, tiny_tokenizer

from benchmarks import llama
from benchmarks.hf import Generate
from benchmarks.llama import LlamaCpp
from benchmarks.peers import Peers, check_llama, peer_settings
from forerun.bench import session
from forerun.bench.datasets import Prompt
from forerun.bench.plan import Plan, parse_methods
from forerun.bench.report import differences
from forerun.sampling.params import SamplingParams

TABLE = [3, 5, 4, 6, 2, 4, 1, 0]  # the token behind each token: 3 6 1 5 4 2 4 2 ...
FOLLOWING = [6, 1, 5, 4, 2, 4, 2, 4, 2, 4]  # behind a 3


class FakeLlama:
    """Decodes by a table, and in the way of the real one: it goes on from the call before where it was not reset."""

    made: ClassVar[list[FakeLlama]] = []
    following: ClassVar[Callable[[Sequence[int]], int]] = staticmethod(lambda tokens: TABLE[tokens[-1]])

    def __init__(self, path: str, **options: Any) -> None:
        self.path, self.options, self.draft_model = path, options, None
        self.kept: list[int] = []
        self.seeds: list[int] = []
        self.asked: list[dict[str, Any]] = []
        self.forwards = 0
        self.made.append(self)

    def reset(self) -> None:
        self.kept = []

    def set_seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def generate(self, tokens: Sequence[int], **options: Any) -> Iterator[int]:
        assert not self.kept, "it still has the call before"
        assert self.draft_model is None or self.options["logits_all"]
        self.asked.append(options)
        self.kept, draft = list(tokens), []
        while True:
            self.forwards += 1
            assert len(self.kept) + len(draft) <= self.options["n_ctx"]
            for guess in [*draft, None]:
                token = type(self).following(self.kept)
                self.kept.append(token)
                yield token
                if token != guess:
                    break
            draft = [] if self.draft_model is None else self.draft_model(np.array(self.kept, np.intc)).tolist()


class FakeLookup:
    """What followed the last token where it stood before."""

    def __init__(self, max_ngram_size: int, num_pred_tokens: int) -> None:
        self.ngram, self.tokens = max_ngram_size, num_pred_tokens

    def __call__(self, tokens: Any) -> Any:
        before = np.flatnonzero(tokens[:-1] == tokens[-1])
        return tokens[before[0] + 1 :][: self.tokens] if before.size else tokens[:0]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeLlama]:
    """Stands where llama-cpp-python does."""
    package, lookup = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    package.__spec__ = ModuleSpec("llama_cpp", None)
    package.Llama, lookup.LlamaPromptLookupDecoding = FakeLlama, FakeLookup  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", lookup)
    monkeypatch.setattr(FakeLlama, "made", [])
    return FakeLlama


def peer(ends: set[int] | None = None, **options: Any) -> LlamaCpp:
    params = SamplingParams(**{"max_new_tokens": 10} | options)
    return LlamaCpp(Path("small.gguf"), params, ends or set(), 300, 3)


def test_plain_decoding_is_the_argmax_of_everything_from_an_empty_cache(fake: type[FakeLlama]) -> None:
    run = peer().run("llama-cpp")
    first = run([[3]], [0], None)
    assert first.tokens == [FOLLOWING] and first.target_forwards == 10 and first.draft_forwards == 0
    assert run([[3, 6, 1]], [0], None).tokens == [[*FOLLOWING[2:], 2, 4]]  # begins as the call before
    assert run([[3]], [0], 4).tokens == [FOLLOWING[:4]]
    (model,) = fake.made
    assert (model.path, model.options) == (
        "small.gguf",
        {"n_ctx": 512, "n_threads": 3, "n_threads_batch": 3, "logits_all": False, "verbose": False},
    )
    neutral = {"temp": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0}
    assert model.asked == [neutral] * 3
    assert model.forwards == 10 + 10 + 4


def test_lookup_has_the_same_tokens_in_fewer_forwards(fake: type[FakeLlama]) -> None:
    decoder = peer(max_new_tokens=30)
    runs = [decoder.run(name) for name in ("llama-cpp", "llama-cpp-lookup", "llama-cpp-lookup/5/3")]
    outcomes = [run([[3]], [0], None) for run in [*runs, *runs]]
    assert all(outcome.tokens == [FOLLOWING + [2, 4] * 10] for outcome in outcomes)
    plain, short, long = (outcome.target_forwards for outcome in outcomes[:3])
    assert plain > short > long and [each.target_forwards for each in outcomes[3:]] == [plain, short, long]
    assert [model.options["logits_all"] for model in fake.made] == [False, True]  # both lookups have one
    assert fake.made[1].forwards == 2 * (short + long)


@pytest.mark.parametrize("name", ["llama-cpp", "llama-cpp-lookup"])
def test_an_output_ends_with_the_end_token(name: str, fake: type[FakeLlama]) -> None:
    assert peer({5, 7}).run(name)([[3]], [0], None).tokens == [[6, 1, 5]]
    assert peer().run(name)([[3]], [0], None).tokens == [FOLLOWING]


def test_sampling_has_the_seed_of_the_row(fake: type[FakeLlama]) -> None:
    peer(temperature=0.7, top_p=0.9).run("llama-cpp")([[3], [4]], [11, 2**32 - 1], None)
    (model,) = fake.made
    assert model.seeds == [11, 0]
    assert all(asked["temp"] == 0.7 and asked["top_p"] == 0.9 for asked in model.asked)


def test_a_file_that_llama_cpp_cannot_read(fake: type[FakeLlama], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str, **options: Any) -> None:
        raise ValueError(f"Failed to load model from file: {path}")

    monkeypatch.setattr(sys.modules["llama_cpp"], "Llama", broken)
    with pytest.raises(ValueError, match=r"llama\.cpp cannot load small\.gguf: Failed to load"):
        peer().run("llama-cpp")


def test_settings_of_lookup_are_in_its_name() -> None:
    assert peer_settings("llama-cpp") == {}
    assert peer_settings("llama-cpp-lookup") == {"num_pred_tokens": 2, "max_ngram_size": 2}
    assert peer_settings("llama-cpp-lookup/8") == {"num_pred_tokens": 8, "max_ngram_size": 2}
    assert peer_settings("llama-cpp-lookup/8/3") == {"num_pred_tokens": 8, "max_ngram_size": 3}
    names = ["ar", "llama-cpp", "llama-cpp-lookup/4"]
    assert list(parse_methods(names, [], None, {}, Peers())) == names


@pytest.mark.parametrize(
    "name", ["llama-cpp-lookup/x", "llama-cpp-lookup/0", "llama-cpp-lookup/2/2/2", "llama-cpp-lookup/"]
)
def test_settings_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match=f"takes two numbers of at least 1, not '{name}'"):
        parse_methods([name], [], None, {}, Peers())


def test_unknown_names_are_unknown() -> None:
    with pytest.raises(ValueError, match=r"unknown method 'llama-cpp/3'; there are .* llama-cpp, llama-cpp-lookup"):
        parse_methods(["llama-cpp/3"], [], None, {}, Peers())


def test_what_llama_cpp_needs(fake: type[FakeLlama], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "small.gguf"
    file.touch()
    check_llama("llama-cpp", str(file), 1, None)
    check_llama("llama-cpp", str(file), 1, "cpu")
    for target, batch, device, message in (
        (str(file), 2, None, "decodes one prompt at a time here: leave it out or set --batch 1"),
        (str(file), 1, "cuda", "runs on the CPU: leave it out or set --device cpu, not cuda"),
        ("some/model", 1, None, "needs a GGUF file as --target, not 'some/model'"),
    ):
        with pytest.raises(ValueError, match=message):
            check_llama("llama-cpp", target, batch, device)
    monkeypatch.setattr("benchmarks.peers.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="method 'llama-cpp' needs 'pip install llama-cpp-python', which compiles"):
        check_llama("llama-cpp", str(file), 1, None)


def test_a_run_says_how_many_outputs_differ_and_by_how_little(
    fake: type[FakeLlama], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp takes the target's second choice behind five tokens, for the first prompt alone."""
    model = tiny("llama", 3, vocab=len(tiny_tokenizer()), context=96)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    margins = []

    @torch.inference_mode()
    def following(tokens: Sequence[int]) -> int:
        best = model(input_ids=torch.tensor([tokens])).logits[0, -1].topk(2)
        if tokens[0] != 5 or len(tokens) != 5:
            return int(best.indices[0])
        margins.append((best.values[0] - best.values[1]).item())
        return int(best.indices[1])

    monkeypatch.setattr(FakeLlama, "following", staticmethod(following))
    monkeypatch.setattr(llama, "find", lambda source: Path("small.gguf"))
    names = ["suffix", "llama-cpp", "llama-cpp-lookup"]
    plan = Plan(parse_methods(names, [], None, {}, Peers()), target=str(tmp_path), max_new_tokens=6)
    prompts = {"stdlib-test": [Prompt("a", tokens=(5, 6, 7)), Prompt("b", tokens=(6, 5, 6))]}
    monkeypatch.setattr(session, "load_prompts", lambda plan, files: (prompts, None))
    found = session.bench(plan, {})
    methods = found["methods"]
    assert methods["ar"]["differences"] is methods["suffix"]["differences"] is None
    for name in ("llama-cpp", "llama-cpp-lookup"):
        assert methods[name]["exact_match"] == 0.5 and methods[name]["tokens"] == 2 * 2 * 6
        (mismatch,) = methods[name]["mismatches"]
        assert (mismatch["prompt"], mismatch["position"], mismatch["times"]) == ("a", 2, 2)
        apart = methods[name]["differences"]
        assert (apart["outputs"], apart["differ"]) == (4, 2)
        assert apart["margin_max"] == pytest.approx(margins[0], abs=1e-4)
        assert methods[name]["time"] is None and methods[name]["alpha"] is None
    lines = differences(found, methods)
    assert len(lines) == 2
    assert lines[0].startswith("llama-cpp: 2 of 4 outputs differ from ar's, at margins of at most")
    assert {each.options["n_threads"] for each in fake.made} == {torch.get_num_threads()}


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_the_real_one_says_what_the_model_says(tmp_path: Path) -> None:
    model = small()
    path = tmp_path / "small.gguf"
    write(path, model, "F32")
    params = SamplingParams(max_new_tokens=24)
    prompt = [5, 6, 7, 5, 6]
    decoder = LlamaCpp(path, params, set(), len(prompt) + 24 + 10, 1)
    for name in ("llama-cpp", "llama-cpp-lookup", "llama-cpp-lookup/4"):
        run = decoder.run(name)
        first, again = (run([prompt], [0], None) for _ in range(2))
        assert first.tokens == again.tokens and first.target_forwards == again.target_forwards
        (tokens,) = first.tokens
        assert len(tokens) == 24
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        behind = logits.max(-1).values - logits[range(24), tokens]
        assert behind.max() < 0.05  # its cache is float16
        if name == "llama-cpp":
            assert first.target_forwards == 24
        ended = LlamaCpp(path, params, {tokens[5]}, decoder.length, 1).run(name)([prompt], [0], None).tokens
        assert ended == [tokens[: tokens.index(tokens[5]) + 1]]
    sampled = LlamaCpp(path, SamplingParams(max_new_tokens=24, temperature=1.0), set(), decoder.length, 1)
    runs = [sampled.run(name) for name in ("llama-cpp", "llama-cpp-lookup")]
    for run in runs:
        outputs = [run([prompt], [seed], None).tokens for seed in (1, 1, 2)]
        assert outputs[0] == outputs[1] != outputs[2]


def test_transformers_peers_sample_with_the_top_p_of_the_run() -> None:
    peers = Generate(tiny("llama"), None, SamplingParams(temperature=0.7, top_p=0.9))
    assert peers.config("hf-ar").top_p == 0.9
