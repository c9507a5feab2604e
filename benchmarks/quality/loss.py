"""What few bits cost: nats a token of one GGUF file in several kinds of weights.

    python -m benchmarks.quality.loss FILE.gguf [--tokens 2000] [--answers 100] [--threads 2] [--out JSON]

Three texts: the documents of this repository and held-out code of the standard library, in windows of 512 tokens; and
answers that the file wrote greedily in float32, where the loss is that of the answer's tokens alone. float32 is the
de-quantised model in transformers' own forward. Beside the loss stand, against float32 at the same places, the standard
error of the difference, the mean absolute difference of all logits and the share of places with another argmax.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import sqrt
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

import forerun
from benchmarks.quality.questions import asked, measured, questions
from forerun.api.loading import load_tokenizer
from forerun.backends.facts import facts_of
from forerun.bench.report import versions
from forerun.model.causal_lm import CausalLM
from forerun.sampling.params import SamplingParams
from forerun.train.corpus import source_files

REFERENCE = "float32"
WINDOW = 512
LENGTH = 64  # of an answer
BATCH = 20  # answers that are written together
MANNERS = (
    "{}",
    "In one sentence: {}",
    "In detail, please. {}",
    "You are an expert. {}",
    "{} Answer with an example.",
)
ROOT = Path(__file__).parents[2]

Text = tuple[list[int], int]  # tokens, and how many of them are only read


@dataclass
class Loss:
    """Sums over places."""

    places: int = 0
    nats: float = 0.0
    more: float = 0.0
    squared: float = 0.0
    apart: float = 0.0
    others: int = 0

    def add(self, logits: Tensor, truth: Tensor, reference: Tensor) -> None:
        """Logits [n, V], the tokens [n] behind them, float32's logits."""
        self.places += len(truth)
        nats = functional.cross_entropy(logits, truth, reduction="none")
        more = (nats - functional.cross_entropy(reference, truth, reduction="none")).double()
        self.nats += nats.sum().item()
        self.more += more.sum().item()
        self.squared += more.square().sum().item()
        self.apart += (logits - reference).abs().mean(-1).sum().item()
        self.others += int((logits.argmax(-1) != reference.argmax(-1)).sum())

    def means(self) -> dict[str, float]:
        more = self.more / self.places
        error = sqrt(max(0.0, self.squared / self.places - more**2) / self.places)
        return {
            "nats": round(self.nats / self.places, 5),
            "more": round(more, 5),
            "more_error": round(error, 5),
            "logits_apart": round(self.apart / self.places, 5),
            "other_argmax": round(self.others / self.places, 5),
        }


def windows(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], count: int) -> list[Text]:
    """The first tokens of texts, in windows. Raises ValueError for too few."""
    tokens: list[int] = []
    for text in texts:
        tokens += tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) >= count:
            break
    if len(tokens) < count:
        raise ValueError(f"the texts have {len(tokens)} tokens, fewer than --tokens {count}")
    return [
        (tokens[start : min(start + WINDOW, count)], 1) for start in range(0, count - 1, WINDOW)
    ]


def documents() -> Iterator[str]:
    for path in (
        ROOT / "LICENSE",
        ROOT / "README.md",
        *sorted(ROOT.glob("docs/*.md")),
        *sorted(ROOT.glob("docs/*/*.md")),
    ):
        yield path.read_text()


def answers(decoder: forerun.Decoder, count: int) -> list[Text]:
    """Questions with the answers that a decoder writes."""
    assert decoder.tokenizer is not None
    plain = questions(min(count, 20))
    prompts = [
        asked(decoder.tokenizer, manner.format(each)) for manner in MANNERS for each in plain
    ][:count]
    params = SamplingParams(max_new_tokens=LENGTH)
    found: list[Text] = []
    for start in range(0, count, BATCH):
        batch = prompts[start : start + BATCH]
        done = decoder.generate(batch, params)
        found += [
            (prompt + each.tokens, len(prompt)) for prompt, each in zip(batch, done, strict=True)
        ]
        print(f"{len(found)} of {count} answers written", flush=True)
    return found


def reading(model: CausalLM) -> Callable[[list[int]], Tensor]:
    """Ours: logits [n, V] of all tokens of a text."""

    def read(tokens: list[int]) -> Tensor:
        model.add(0, len(tokens))
        (logits,) = model.extend([0], [tokens])
        model.drop(0)
        return logits.float()

    return read


def compare(
    readers: dict[str, Callable[[list[int]], Tensor]], texts: Sequence[Text], name: str
) -> dict[str, Any]:
    """Losses of all readers; the reference comes first."""
    found = {each: Loss() for each in readers}
    seconds = dict.fromkeys(readers, 0.0)
    for number, (tokens, given) in enumerate(texts):
        truth, reference = torch.tensor(tokens[given:]), None
        for each, read in readers.items():
            begun = perf_counter()
            logits = read(tokens)[given - 1 : -1]
            seconds[each] += perf_counter() - begun
            reference = logits if reference is None else reference
            found[each].add(logits, truth, reference)
        if number % 10 == 9:
            print(
                f"{name}: {number + 1} of {len(texts)} texts, "
                + ", ".join(f"{k} {v:.0f} s" for k, v in seconds.items())
            )
    print(f"\n{name}, {found[REFERENCE].places} tokens\n")
    print(
        "| | nats a token | beside float32 | logits apart | other argmax |",
        "|---|---:|---:|---:|---:|",
        sep="\n",
    )
    for each, own in found.items():
        row = own.means()
        more = f"{row['more']:+.4f} ({row['more_error']:.4f})"
        print(
            f"| {each} | {row['nats']:.4f} | {more} | {row['logits_apart']:.4f} | {row['other_argmax']:.2%} |"
        )
    print(flush=True)
    return {"texts": len(texts), "tokens": found[REFERENCE].places} | {
        each: own.means() for each, own in found.items()
    }


@torch.inference_mode()
def measure(given: argparse.Namespace) -> dict[str, Any]:
    tokenizer = load_tokenizer(given.file)
    texts: dict[str, list[Text]] = {}
    if given.tokens:
        code = (text for _, text in source_files("test"))
        texts = {
            "documents": windows(tokenizer, documents(), given.tokens),
            "code": windows(tokenizer, code, given.tokens),
        }
    kinds = [REFERENCE, *(kind for kind in given.kinds.split(",") if kind != REFERENCE)]
    how: dict[str, Any] = {
        "method": "ar",
        "tokenizer": tokenizer,
        "device": "cpu",
        "prefix_bytes": 0,
    }
    decoders = {
        kind: forerun.load(given.file, weights=kind, fast=kind != REFERENCE, **how)
        for kind in kinds
    }
    texts["answers"] = answers(decoders[REFERENCE], given.answers) if given.answers else []
    readers = {kind: reading(decoder.target.fresh()) for kind, decoder in decoders.items()}
    return {
        "loss": {name: compare(readers, own, name) for name, own in texts.items() if own},
        "targets": {kind: facts_of(decoder.target) for kind, decoder in decoders.items()},
        "arguments": vars(given) | {"file": Path(given.file).name, "out": None},
        "versions": versions(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", metavar="FILE.gguf")
    parser.add_argument(
        "--tokens", type=int, default=2000, help="of the documents, and of code; 0 for none"
    )
    parser.add_argument("--answers", type=int, default=100, help="at most 100; 0 for none")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kinds", default="auto,int8,bfloat16", help="of weights, beside float32")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if (
        not 0 <= given.answers <= 100
        or given.tokens < 0
        or not given.answers + given.tokens
        or given.threads < 1
    ):
        parser.error("--answers must be between 0 and 100, --tokens and --threads above 0")
    measured(parser, given, measure)
    if given.out is not None:
        print(f"{given.out} has it all")


if __name__ == "__main__":
    main()
