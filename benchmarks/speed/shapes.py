"""Decode models of known shapes with random weights, beside llama.cpp on the same files.

    python -m benchmarks.speed.shapes [--models Qwen3-4B,gpt-oss-20b] [--rounds 6] [--context 256]
        [--threads 2] [--folder FOLDER] [--out JSON]

Files are written one at a time (`random_files.py`), and removed after their use. Both programs hold
the file's model, read the same random context, and take turns:

- plain: both decode TOKENS tokens, one after the other, greedily, in turns; BLOCKS times in a
  round, of which the fastest counts, because llama.cpp falls to a tenth of its speed while another
  process has one of its cores;
- forwards: ours of 1, 4 and 8 random tokens after the context, in each instruction set of
  INSTRUCTION_SETS that the processor has.

A figure is the median over rounds; a ratio is that of each round. Random tokens share fewer experts
than those of a text, so experts are faster on texts. Results of models that are not measured stay
in the file of --out. The exit status is 1 if a limit does not hold. llama.cpp runs in its best
build for the processor: `npm install node-llama-cpp`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch

import forerun
from benchmarks.peers.llama import LlamaCpp, context_length, llama_version
from benchmarks.speed.random_files import SHAPES, Shape, write_file
from forerun import SamplingParams
from forerun.backends.gguf.model import load_gguf
from forerun.bench.measure import turned
from forerun.bench.report import provenance
from forerun.csrc.library import library, variant, variants
from forerun.engine.draft import Draft

OUT = Path(__file__).with_suffix(".json")
INSTRUCTION_SETS = ("avx512vnni", "avx2")
COUNTS = (1, 4, 8)  # new tokens of a forward
TOKENS = 8  # that both programs decode at a time
BLOCKS = 3  # such times in a round
REPEATS = 6  # forwards of one size in succession
WARM_UP = 2  # untimed forwards before them, and untimed tokens before those of a round
PAUSE_SECONDS = 0.3  # in which threads that wait for work go to sleep
SPARE = 64  # positions beyond those that are filled
SEED = 0
MS = 1000

Facts = dict[str, Any]


@dataclass(frozen=True)
class Limit:
    """What a figure has to be.

    Attributes:
        name: of the figure.
        bound: the number that it must reach.
        is_most: whether it must be no more than the bound, and not no less.
    """

    name: str
    bound: float
    is_most: bool = False

    def holds(self, figure: float) -> bool:
        """Return whether a figure is within the bound."""
        return figure <= self.bound if self.is_most else figure >= self.bound


PLAIN = Limit("plain over llama.cpp", 1.2)
DENSE_LIMITS = (
    PLAIN,
    Limit("4 over 1, avx512vnni", 1.35, is_most=True),
    Limit("4 over 1, avx2", 1.5, is_most=True),
)
EXPERT_LIMITS = (
    PLAIN,
    Limit("4 single ones over 4, avx512vnni", 1.0),
    Limit("8 single ones over 8, avx512vnni", 1.5),
)


class Ours:
    """forerun with a file's model.

    Attributes:
        note: a line about matrices of changed format, or None.
    """

    def __init__(self, path: Path, context: Sequence[int], positions: int) -> None:
        model, self.note = load_gguf(path)
        decoder = forerun.load(model, method="ar", prefix_bytes=0)
        params = SamplingParams(max_new_tokens=positions - len(context), ignore_eos=True)
        self._vocabulary = decoder.target.vocab_size
        self._rng = np.random.default_rng(SEED)
        self._steps = decoder.session.add([decoder.request(list(context), params)])
        self._model = decoder.target.fresh()
        list(self._model.prefill(list(context), len(context)))
        self._model.join(0, positions)
        next(self._steps)  # reads the context

    def decode(self) -> float:
        """Decode tokens, and return the milliseconds of one."""
        for _ in range(WARM_UP):
            next(self._steps)
        started_at = perf_counter()
        for _ in range(TOKENS):
            next(self._steps)
        return MS * (perf_counter() - started_at) / TOKENS

    def forward(self, count: int) -> float:
        """Return the median milliseconds of forwards of so many tokens."""
        times = []
        for _ in range(WARM_UP + REPEATS):
            tokens = self._rng.integers(3, self._vocabulary, count).tolist()
            draft = Draft.chain(tokens[0], tokens[1:])
            started_at = perf_counter()
            self._model.forward([0], [draft])
            times.append(MS * (perf_counter() - started_at))
        return median(times[WARM_UP:])


def select(name: str) -> None:
    """Choose an instruction set. All of them read the same panels and compute the same bits."""
    functions = library()
    assert functions is not None
    if functions.fr_select(name.encode()) < 0:
        raise ValueError(f"this processor has no {name}")


def llama_ms(llama: LlamaCpp, context: Sequence[int]) -> float:
    """Decode tokens with llama.cpp, and return the milliseconds of one."""
    answer = llama.turn("llama-cpp", context, TOKENS + 1)
    return MS * (answer["seconds"] - answer["first"]) / TOKENS


def rounds_of(
    ours: Ours, llama: LlamaCpp, context: Sequence[int], count: int
) -> Iterator[dict[str, float]]:
    """Yield the milliseconds of each round, by what was measured. Orders change."""
    names = [name for name in INSTRUCTION_SETS if name in variants()]
    best = variant()
    assert best is not None
    calls: dict[str, Callable[[], float]] = {
        "forerun": ours.decode,
        "llama.cpp": lambda: llama_ms(llama, context),
    }
    llama_ms(llama, context)  # reads the context
    for number in range(count):
        times = dict.fromkeys(calls, math.inf)
        for block in range(BLOCKS):
            for name in turned(list(calls), number, block):
                sleep(PAUSE_SECONDS)
                times[name] = min(times[name], calls[name]())
        sleep(PAUSE_SECONDS)
        for name in turned(names, number, 0):
            select(name)
            for tokens in COUNTS:
                times[f"{tokens}, {name}"] = ours.forward(tokens)
        select(best)
        yield times


def summary(rounds: Sequence[dict[str, float]]) -> Facts:
    """Return the medians of rounds, and the ratios of their times."""
    ms = {name: round(median(times[name] for times in rounds), 2) for name in rounds[0]}
    ratios = {PLAIN.name: ratio(rounds, "llama.cpp", "forerun")}
    for name in INSTRUCTION_SETS:
        one = f"1, {name}"
        for count in COUNTS[1:] if one in ms else ():
            many = f"{count}, {name}"
            ratios[f"{count} over 1, {name}"] = ratio(rounds, many, one)
            ratios[f"{count} single ones over {count}, {name}"] = ratio(rounds, one, many, count)
    return {"ms": ms, "ratios": ratios}


def ratio(
    rounds: Iterable[dict[str, float]], above: str, below: str, factor: float = 1
) -> dict[str, float]:
    """Return the ratio of two times of a round: its median, and the lowest and the highest one."""
    values = [factor * times[above] / times[below] for times in rounds]
    return {
        "median": round(median(values), 3),
        "lowest": round(min(values), 3),
        "highest": round(max(values), 3),
    }


def limits_of(shape: Shape, ratios: Facts) -> list[Facts]:
    """Return which limits a model's ratios have to keep, and whether they do."""
    limits = []
    for limit in EXPERT_LIMITS if shape.experts else DENSE_LIMITS:
        if limit.name in ratios:
            figure = ratios[limit.name]["median"]
            limits.append(
                {
                    "name": limit.name,
                    "at most" if limit.is_most else "at least": limit.bound,
                    "measured": figure,
                    "holds": limit.holds(figure),
                }
            )
    return limits


def measure(name: str, args: argparse.Namespace) -> Facts:
    """Write a model's file, and return the model's figures."""
    shape = SHAPES[name]
    rng = np.random.default_rng(SEED)
    context = rng.integers(3, shape.vocabulary, args.context).tolist()
    positions = context_length(args.context + args.rounds * BLOCKS * (TOKENS + WARM_UP) + SPARE)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / f"{name}.gguf"
        write_file(path, shape, SEED)
        ours = Ours(path, context, positions)
        models = {"target": str(path), "length": positions, "threads": args.threads}
        with closing(LlamaCpp(models, SamplingParams(), set())) as llama:
            rounds = list(rounds_of(ours, llama, context, args.rounds))
            peer = {"node-llama-cpp": llama_version(), "processor": llama.processor}
        file_bytes = path.stat().st_size
    figures = summary(rounds)
    arguments = {key: getattr(args, key) for key in ("rounds", "context", "threads")}
    return {
        "layers": [shape.layers, shape.model_layers],
        "file_bytes": file_bytes,
        "note": ours.note,
        **figures,
        "limits": limits_of(shape, figures["ratios"]),
        "rounds": [{key: round(taken, 2) for key, taken in times.items()} for times in rounds],
        "llama.cpp": peer,
        **provenance(arguments | {"model": name}),
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(SHAPES), help="names, with commas between")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--context", type=int, default=256, help="tokens before those measured")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="of the files, 3 GB; default: a temporary one")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.models = args.models.split(",")
    unknown = [name for name in args.models if name not in SHAPES]
    if unknown:
        parser.error(f"--models: no {unknown[0]!r}; there are {', '.join(SHAPES)}")
    if min(args.rounds, args.context, args.threads) < 1:
        parser.error("--rounds, --context and --threads must be at least 1")
    return args


def main() -> int:
    args = parsed()
    torch.set_num_threads(args.threads)
    status = 0
    for name in args.models:
        figures = measure(name, args)
        print(json.dumps({name: {key: figures[key] for key in ("ms", "limits")}}), flush=True)
        kept = json.loads(args.out.read_text()) if args.out.is_file() else {}
        kept[name] = figures
        ordered = {model: kept[model] for model in SHAPES if model in kept}
        args.out.write_text(json.dumps(ordered, indent=1) + "\n")
        status |= not all(limit["holds"] for limit in figures["limits"])
    return status


if __name__ == "__main__":
    sys.exit(main())
