"""llama.cpp as a peer: what it is asked for, with a stand-in; what it decodes, if node-llama-cpp is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ggufs import small, write

from benchmarks import llama
from benchmarks.llama import LlamaCpp
from benchmarks.peers import Peers, check_llama, llama_mode, peer_settings
from forerun.api.decoder import Decoder
from forerun.bench import measure
from forerun.bench.datasets import Prompt
from forerun.bench.measure import Loaded, decoder_run
from forerun.bench.plan import Plan, parse_methods
from forerun.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
ROOT = Path(llama.__file__).parents[1]
# Decodes by a table, answers with what it was asked, and saves a forward where it drafts.
STANDIN = """
import readline from "node:readline";
const table = [3, 5, 4, 6, 2, 4, 1, 0];
let first = true;
for await (const line of readline.createInterface({input: process.stdin})) {
    const asked = JSON.parse(line), found = [];
    if (first) { first = false; console.log(JSON.stringify({processor: line})); continue; }
    if (asked.tokens.includes(7)) { console.log(JSON.stringify({error: "no room"})); continue; }
    if (asked.tokens.includes(0)) process.exit(1);
    for (let last = asked.tokens.at(-1); found.length < asked.most && !asked.ends.includes(last);)
        found.push(last = table[last]);
    const drafts = Object.keys(asked.mode).length;
    console.log(JSON.stringify({tokens: found, seconds: asked.sampling.temperature, forwards: found.length - drafts}));
}
"""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LlamaCpp]:
    script = tmp_path / "standin.mjs"
    script.write_text(STANDIN)
    monkeypatch.setattr(llama, "SCRIPT", script)
    started = LlamaCpp({"target": "small.gguf"}, SamplingParams(max_new_tokens=6, temperature=0.5), {4})
    yield started
    started.process.kill()
    started.process.wait()


def test_it_decodes_to_the_end_token_with_its_own_drafts(peer: LlamaCpp) -> None:
    assert "small.gguf" in peer.processor
    plain, drafting = (peer.run(name)([[3], [1, 3]], [0, 1], None) for name in ("llama-cpp", "llama-cpp-draft/2"))
    assert plain.tokens == drafting.tokens == [[6, 1, 5, 4], [6, 1, 5, 4]]
    assert (plain.target_forwards, drafting.target_forwards, plain.seconds) == (8, 6, 1.0)
    assert peer.run("llama-cpp")([[3]], [0], 2).tokens == [[6, 1]]


def test_its_errors_are_one_line(peer: LlamaCpp, monkeypatch: pytest.MonkeyPatch) -> None:
    for token, message in ((7, r"llama\.cpp cannot decode: no room"), (0, "ended: `npm install node-llama-cpp`")):
        with pytest.raises(ValueError, match=message):
            peer.run("llama-cpp")([[token]], [0], None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="there is no node"):
        LlamaCpp({}, SamplingParams(), set())


def test_names_say_how_it_drafts(tmp_path: Path) -> None:
    assert llama_mode("llama-cpp") == {}
    assert llama_mode("llama-cpp-draft/4/0.5") == {"draft": {"maxTokens": 4, "minConfidence": 0.5}}
    lookup = {"predictionLength": {"min": 1, "max": 5}, "patternLength": {"min": 1, "max": 2}}
    assert llama_mode("llama-cpp-lookup/5/2") == {"lookup": lookup}
    for name in ("llama-cpp-draft/0", "llama-cpp-draft/1/2", "llama-cpp-lookup/0", "llama-cpp-lookup/1/2/3"):
        with pytest.raises(ValueError, match="takes"):
            peer_settings(name)
    path = str(write(tmp_path / "small.gguf", small()))
    check_llama("llama-cpp-draft", path, path, 1, None)
    for target, draft, batch, device, message in (
        (path, None, 1, None, "needs a GGUF file as --draft"),
        ("embedded", path, 1, None, "needs a GGUF file as --target"),
        (path, path, 2, None, "one prompt at a time"),
        (path, path, 1, "cuda", "runs on the CPU"),
    ):
        with pytest.raises(ValueError, match=message):
            check_llama("llama-cpp-draft", target, draft, batch, device)


def test_it_is_a_runner_of_a_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started once for all its methods. `test_bench.py` has what is counted of a runner's outputs."""
    started: list[str] = []

    def load_llama(loaded: Loaded) -> Any:
        started.append(loaded.plan.target)
        return SimpleNamespace(run=lambda name: decoder_run(Decoder(loaded.target.model), loaded.plan.params()))

    monkeypatch.setattr(llama, "load_llama", load_llama)
    monkeypatch.setattr(measure, "load_prompts", lambda *_: ({"own": [Prompt("a", tokens=(5, 6, 7))]}, None))
    names, path = ["llama-cpp", "llama-cpp-lookup"], str(write(tmp_path / "small.gguf", small()))
    methods = parse_methods(names, [], None, {}, Peers())
    found = measure.bench(Plan(methods, target=path, max_new_tokens=6, weights="float32"), {})
    assert started == [path] and {found["methods"][name]["exact_match"] for name in names} == {1.0}


@pytest.mark.skipif(not (ROOT / "node_modules/node-llama-cpp").is_dir(), reason="node-llama-cpp is not installed")
def test_the_real_one_decodes_what_the_model_does(tmp_path: Path) -> None:
    model, prompt = small(), [5, 6, 7, 5, 6]
    path = str(write(tmp_path / "small.gguf", model, "F32"))
    models = {"target": path, "draft": path, "length": 256, "threads": 1}
    greedy = LlamaCpp(models, SamplingParams(max_new_tokens=24), set())
    for name in ("llama-cpp", "llama-cpp-lookup", "llama-cpp-draft/3"):
        (tokens,) = greedy.run(name)([prompt], [0], None).tokens
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        below = logits.max(-1).values - logits[range(24), tokens]
        assert below.max() < 0.05  # its cache is float16
    greedy.ends = {tokens[5]}
    assert greedy.run("llama-cpp")([prompt], [0], None).tokens == [tokens[: tokens.index(tokens[5]) + 1]]
    sampled = LlamaCpp(models, SamplingParams(max_new_tokens=24, temperature=1.0), set()).run("llama-cpp")
    first, again, other = (sampled([prompt], [seed], None).tokens for seed in (1, 1, 2))
    assert first == again != other
