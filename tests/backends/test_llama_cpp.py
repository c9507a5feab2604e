"""Tiny files of all architectures give llama.cpp's logits and its greedy tokens.

With weights in float32 its gelu in 16 bits is what differs. With weights in 8 bits both round
inputs to 8 bits, and a rounded input may choose another expert.

`.ci/llama-cpp` runs this in an environment of its own, because llama.cpp's wheel is large.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.backends import prepare
from forerun.backends.gguf.model import load_gguf
from tests.support import ggufs

pytest.importorskip("xllamacpp", reason="needs the package xllamacpp")
from benchmarks.peers.llama_logits import LlamaLogits

CONTEXT = 256
NEW_TOKENS = 6
# llama.cpp ignores the windows of these, so their texts end before they are full.
WITHOUT_WINDOWS = ("mistral", "phi3")
# llama.cpp knows windows of EXAONE 4 in models of 64 layers alone.
OTHERWISE = ("exaone4",)
# llama.cpp rounds the corners of YaRN's ramp, and OpenAI's own code does not.
CHANGES = {"gpt-oss": {"gpt-oss.rope.scaling.factor": 1.0}}
# A token is a word here, because llama.cpp gives no probabilities within a character.
WORDS = ["\u010a", *(f"word{number}" for number in range(1, ggufs.VOCAB))]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.token_type": [1] * ggufs.VOCAB,
    "tokenizer.ggml.merges": ["w o"],
}
IMPROBABLE = -15.0  # a log-probability below it says little


def largest_difference(path: Path, prompts: list[list[int]]) -> float:
    """Return the largest difference of a probable token's logarithm, after llama.cpp's tokens.

    Its tokens are ours too, where ours is clearer than that difference.
    """
    theirs = LlamaLogits(path, CONTEXT)
    model = prepare(load_gguf(path)[0])
    assert model.exact == "bitwise"
    largest = 0.0
    for id, prompt in enumerate(prompts):
        steps = theirs.greedy(prompt, NEW_TOKENS, ggufs.VOCAB)
        assert len(steps) == NEW_TOKENS
        model.add(id)
        text = prompt + [step.token for step in steps[:-1]]
        rows = model.extend([id], [text])[0][len(prompt) - 1 :].double().log_softmax(-1)
        for row, step in zip(rows, steps, strict=True):
            logs = {token: log for token, log in step.logs.items() if log > IMPROBABLE}
            differences = [abs(float(row[token]) - log) for token, log in logs.items()]
            largest = max(largest, *differences)
            assert float(row.max() - row[step.token]) <= 2 * largest
    return largest


@pytest.mark.parametrize("kind", [kind for kind in ggufs.KINDS if kind not in OTHERWISE])
@pytest.mark.parametrize(("type", "tolerance"), [("F32", 5e-3), ("Q8_0", 0.4)])
def test_logits_and_greedy_tokens_are_those_of_llama_cpp(
    tmp_path: Path, kind: str, type: str, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(5)
    lengths = (3, 5) if kind in WITHOUT_WINDOWS else (3, 11, 33, 60)
    prompts = [torch.randint(3, 300, (n,), generator=generator).tolist() for n in lengths]
    metadata = TOKENIZER | CHANGES.get(kind, {})
    ggufs.write_kind(tmp_path / "a.gguf", kind, type, tokenizer=False, metadata=metadata)
    assert largest_difference(tmp_path / "a.gguf", prompts) <= tolerance
