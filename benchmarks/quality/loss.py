"""What few bits cost: nats per token of one GGUF file in several kinds of weights.

    python -m benchmarks.quality.loss FILE.gguf [--tokens 2000] [--answers 100] [--threads 2]
        [--out JSON]

There are three texts: the documents of this repository and held-out code of the standard library,
in windows of 512 tokens; and answers that the file wrote greedily in float32, of which only the
answer's tokens count. float32 is the de-quantised model in transformers' own forward. Beside the
loss stand, against float32 at the same places, the standard error of the difference, the mean
absolute difference of all logits, and the share of places with another argmax.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from forerun.bench.report import provenance
from forerun.model.causal_lm import CausalLM
from forerun.sampling.params import SamplingParams
from forerun.train.corpus import source_files

Reader = Callable[[list[int]], Tensor]  # returns the logits [n, V] after all tokens of a text

ROOT = Path(__file__).parents[2]
REFERENCE = "float32"
WINDOW = 512
ANSWER_TOKENS = 64
BATCH = 20  # answers that are written together
MANNERS = (
    "{}",
    "In one sentence: {}",
    "In detail, please. {}",
    "You are an expert. {}",
    "{} Answer with an example.",
)
QUESTIONS = 20
MOST_ANSWERS = QUESTIONS * len(MANNERS)


@dataclass(frozen=True)
class Text:
    """Tokens, of which the first `given` are only read."""

    tokens: list[int]
    given: int


@dataclass
class Loss:
    """Sums over places of a text.

    Attributes:
        nats: cross-entropy.
        more: how much more that is than the reference's.
        squared: the square of it.
        apart: the mean absolute difference of the logits.
        others: places at which another token has the largest logit.
    """

    places: int = 0
    nats: float = 0.0
    more: float = 0.0
    squared: float = 0.0
    apart: float = 0.0
    others: int = 0

    def add(self, logits: Tensor, truth: Tensor, reference: Tensor) -> None:
        """Add places.

        Args:
            logits: [n, V].
            truth: the tokens [n] that follow.
            reference: float32's logits [n, V].
        """
        self.places += len(truth)
        nats = functional.cross_entropy(logits, truth, reduction="none")
        more = (nats - functional.cross_entropy(reference, truth, reduction="none")).double()
        self.nats += nats.sum().item()
        self.more += more.sum().item()
        self.squared += more.square().sum().item()
        self.apart += (logits - reference).abs().mean(-1).sum().item()
        self.others += int((logits.argmax(-1) != reference.argmax(-1)).sum())

    def means(self) -> dict[str, float]:
        """Return the means over all places, and the standard error of `more`."""
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
    """Return the first `count` tokens of texts, in windows. Raises ValueError for too few."""
    tokens: list[int] = []
    for text in texts:
        tokens += tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) >= count:
            break
    if len(tokens) < count:
        raise ValueError(f"the texts have {len(tokens)} tokens, fewer than --tokens {count}")
    starts = range(0, count - 1, WINDOW)
    return [Text(tokens[start : min(start + WINDOW, count)], 1) for start in starts]


def documents() -> Iterator[str]:
    """Yield the documents of this repository."""
    fixed = (ROOT / "LICENSE", ROOT / "README.md")
    for path in (*fixed, *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docs/*/*.md"))):
        yield path.read_text()


def answers(decoder: forerun.Decoder, count: int) -> list[Text]:
    """Return questions with the answers that a decoder writes."""
    assert decoder.tokenizer is not None
    texts = questions(min(count, QUESTIONS))
    prompts = [
        asked(decoder.tokenizer, manner.format(text)) for manner in MANNERS for text in texts
    ][:count]
    params = SamplingParams(max_new_tokens=ANSWER_TOKENS)
    written: list[Text] = []
    for start in range(0, count, BATCH):
        batch = prompts[start : start + BATCH]
        completions = decoder.generate(batch, params)
        for prompt, completion in zip(batch, completions, strict=True):
            written.append(Text(prompt + completion.tokens, len(prompt)))
        print(f"{len(written)} of {count} answers written", flush=True)
    return written


def reader_of(model: CausalLM) -> Reader:
    """Return a function that reads a text in one forward."""

    def read(tokens: list[int]) -> Tensor:
        model.add(0, len(tokens))
        (logits,) = model.extend([0], [tokens])
        model.drop(0)
        return logits.float()

    return read


def compare(readers: dict[str, Reader], texts: Sequence[Text], name: str) -> dict[str, Any]:
    """Return and print the losses of all readers; the first one is the reference."""
    losses = {kind: Loss() for kind in readers}
    seconds = dict.fromkeys(readers, 0.0)
    for number, text in enumerate(texts, 1):
        truth = torch.tensor(text.tokens[text.given :])
        reference = None
        for kind, read in readers.items():
            started_at = perf_counter()
            logits = read(text.tokens)[text.given - 1 : -1]
            seconds[kind] += perf_counter() - started_at
            reference = logits if reference is None else reference
            losses[kind].add(logits, truth, reference)
        if number % 10 == 0:
            times = ", ".join(f"{kind} {spent:.0f} s" for kind, spent in seconds.items())
            print(f"{name}: {number} of {len(texts)} texts, {times}")
    means = {kind: loss.means() for kind, loss in losses.items()}
    places = losses[REFERENCE].places
    show(f"{name}, {places} tokens", means)
    return {"texts": len(texts), "tokens": places, **means}


def show(title: str, means: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}\n")
    print("| | nats a token | beside float32 | logits apart | other argmax |")
    print("|---|---:|---:|---:|---:|")
    for kind, row in means.items():
        print(
            f"| {kind} | {row['nats']:.4f} | {row['more']:+.4f} ({row['more_error']:.4f}) | "
            f"{row['logits_apart']:.4f} | {row['other_argmax']:.2%} |"
        )
    print(flush=True)


@torch.inference_mode()
def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the losses of all kinds of weights on all texts."""
    tokenizer = load_tokenizer(args.file)
    texts: dict[str, list[Text]] = {}
    if args.tokens:
        code = (text for _, text in source_files("test"))
        texts["documents"] = windows(tokenizer, documents(), args.tokens)
        texts["code"] = windows(tokenizer, code, args.tokens)
    decoders = {}
    for kind in (REFERENCE, *(kind for kind in args.kinds.split(",") if kind != REFERENCE)):
        decoders[kind] = forerun.load(
            args.file,
            weights=kind,
            fast=kind != REFERENCE,
            method="ar",
            tokenizer=tokenizer,
            device="cpu",
            prefix_bytes=0,
        )
    if args.answers:
        texts["answers"] = answers(decoders[REFERENCE], args.answers)
    readers = {kind: reader_of(decoder.target.fresh()) for kind, decoder in decoders.items()}
    losses = {name: compare(readers, some, name) for name, some in texts.items() if some}
    targets = {kind: facts_of(decoder.target) for kind, decoder in decoders.items()}
    arguments = vars(args) | {"file": Path(args.file).name, "out": None}
    return {"loss": losses, "targets": targets, **provenance(arguments)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", metavar="FILE.gguf")
    parser.add_argument(
        "--tokens", type=int, default=2000, help="of the documents, and of code; 0 for none"
    )
    parser.add_argument(
        "--answers", type=int, default=MOST_ANSWERS, help=f"at most {MOST_ANSWERS}; 0 for none"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kinds", default="auto,int8,bfloat16", help="of weights, beside float32")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    has_texts = args.answers + args.tokens > 0
    if not 0 <= args.answers <= MOST_ANSWERS or args.tokens < 0 or not has_texts:
        parser.error(
            f"--answers must be between 0 and {MOST_ANSWERS}, --tokens at least 0, and one of them "
            "above 0"
        )
    if args.threads < 1:
        parser.error("--threads must be at least 1")
    measured(parser, args, measure)
    if args.out is not None:
        print(f"{args.out} has all results")


if __name__ == "__main__":
    main()
