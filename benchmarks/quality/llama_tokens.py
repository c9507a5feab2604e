"""Are the greedy tokens of a GGUF file those of llama.cpp, up to the first near-tie?

    .ci/llama-cpp install
    .venv/llama-cpp/bin/python -m benchmarks.quality.llama_tokens FILE.gguf [--prompts 20]
        [--tokens 64] [--threads 2] [--out JSON]

Both continue the same questions greedily, llama.cpp with keys and values in float32. Where the
first token differs, the results have the gap between both tokens' log-probabilities in either
program, and with the file's weights in float32, where no input is rounded to 8 bits. A small gap is
a near-tie. Then drafts of suffixes, and of them beside the file as its own draft model, have to
give the tokens of plain decoding.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

import forerun
from benchmarks.peers.llama_logits import LlamaLogits, Step
from benchmarks.quality.questions import asked, measured, questions
from forerun.api.load import Decoder
from forerun.bench.report import provenance

TOP = 10  # of llama.cpp's probabilities at each place
SPARE = 16  # positions beyond the longest text
NEAR = 0.5  # a gap of log-probabilities that rounding may close, in nats
METHODS: dict[str, dict[str, Any]] = {"suffix": {}, "hybrid": {"other": "sd"}}

Results = dict[str, Any]


@dataclass(frozen=True)
class Compared:
    """A prompt's output beside llama.cpp's.

    Attributes:
        tokens: of the output.
        agreed: how many of the first ones are the same.
        ours, theirs: how far the other program's token lies behind at the first difference, in
            nats; None without a difference, and if it is not among llama.cpp's first TOP.
        unrounded: how far llama.cpp's token lies behind ours in float32.
    """

    tokens: int
    agreed: int
    ours: float | None = None
    theirs: float | None = None
    unrounded: float | None = None

    @property
    def is_near_tie(self) -> bool:
        """Whether both programs find the two tokens of the first difference nearly as probable."""
        return all(gap is not None and gap < NEAR for gap in (self.ours, self.theirs))


@dataclass(frozen=True)
class Models:
    """A file's model in its own formats, and in float32."""

    stored: Decoder
    float32: Decoder


def compare(models: Models, prompt: list[int], tokens: list[int], steps: list[Step]) -> Compared:
    """Compare an output with llama.cpp's."""
    pairs = list(zip(tokens, steps, strict=True))
    agreed = next((at for at, (token, step) in enumerate(pairs) if token != step.token), len(pairs))
    if agreed == len(pairs):
        return Compared(len(pairs), agreed)
    token, step = pairs[agreed]
    behind = step.logs[step.token] - step.logs[token] if token in step.logs else None
    ours, unrounded = (
        next_logs(decoder, prompt + tokens[:agreed]) for decoder in (models.stored, models.float32)
    )
    return Compared(
        len(pairs),
        agreed,
        float(ours[token] - ours[step.token]),
        behind,
        float(unrounded[token] - unrounded[step.token]),
    )


def prompt_of(tokenizer: Any, question: str) -> list[int]:
    """Return a question as a chat, or as it is if the file has no chat template."""
    if tokenizer.chat_template is None:
        return list(tokenizer(question)["input_ids"])
    return asked(tokenizer, question)


def next_logs(decoder: Decoder, text: list[int]) -> torch.Tensor:
    """Return our log-probabilities [V] after a text."""
    model = decoder.target.fresh()
    model.add(0)
    return model.extend([0], [text])[0][-1].double().log_softmax(-1)


def outputs(decoder: Decoder, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Return the greedy outputs of prompts, one after the other."""
    return [
        decoder.generate(prompt, max_new_tokens=count, ignore_eos=True).tokens for prompt in prompts
    ]


def measure(args: argparse.Namespace) -> Results:
    """Compare the outputs of a file."""
    plain = forerun.load(args.file, method="ar")
    prompts = [prompt_of(plain.tokenizer, question) for question in questions(args.prompts)]
    ours = outputs(plain, prompts, args.tokens)
    models = Models(plain, forerun.load(args.file, method="ar", weights="float32"))
    context = max(map(len, prompts)) + args.tokens + SPARE
    llama = LlamaLogits(args.file, context, args.threads)
    compared = [
        compare(models, prompt, tokens, llama.greedy(prompt, args.tokens, TOP))
        for prompt, tokens in zip(prompts, ours, strict=True)
    ]
    del llama
    equal = {}
    for name, settings in METHODS.items():
        draft = args.file if name == "hybrid" else None
        decoder = forerun.load(args.file, draft, method=name, **settings)
        drafted = outputs(decoder, prompts, args.tokens)
        equal[name] = sum(a == b for a, b in zip(ours, drafted, strict=True))
    results = summary(compared, equal)
    print(results["summary"])
    arguments = {"file": args.file.name, "prompts": args.prompts, "tokens": args.tokens}
    arguments |= {"threads": args.threads, "xllamacpp": version("xllamacpp")}
    return provenance(arguments) | results


def summary(compared: list[Compared], equal: dict[str, int]) -> Results:
    """Return what was found, in short and of each prompt."""
    different = [output for output in compared if output.agreed < output.tokens]
    return {
        "summary": {
            "outputs": len(compared),
            "equal": sum(output.agreed == output.tokens for output in compared),
            "median_agreed": median(output.agreed for output in compared),
            "near_ties": sum(output.is_near_tie for output in different),
            "float32_takes_ours": sum((output.unrounded or 0) > 0 for output in different),
            "equal_to_ar": equal,
        },
        "outputs": [asdict(output) for output in compared],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="a GGUF file")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    measured(parser, args, measure)


if __name__ == "__main__":
    main()
