"""Does it pay that the planner knows how costs grow with the text? `hybrid` in turns with itself.

    python -m benchmarks.speed.context_costs --out FILE.json [--lengths 512,8192] [--rounds 4]

`hybrid` decodes after short and long texts with its table of costs at two contexts, and with the
half of the table that was measured after a short text. Both stand beside plain decoding, in one
process, on the same prompts, in an order that changes. Both correct their costs by what steps take,
as users have it. Texts are those of the runs qwen-coder/long/16000, with the middle of their code
left out. A prompt is read once; the times are of decoding alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import forerun
from forerun import SamplingParams
from forerun.bench.measure import turned
from forerun.bench.report import provenance
from forerun.files import write_text
from forerun.text.chat import chat_prompt

TEXTS = Path(__file__).parent / "qwen-coder" / "long-16000.jsonl.gz"
SALT = "no request drafts from another one's output"


@dataclass(frozen=True)
class Run:
    """One prompt, decoded once: its output, the ms of a token, and drafted tokens a step."""

    tokens: list[int]
    token_ms: float
    drafted: float


def prompts(decoder: forerun.Decoder, length: int) -> list[list[int]]:
    """Return prompts of a number of tokens: the beginning and the end of each long one."""
    lines = gzip.decompress(TEXTS.read_bytes()).decode().splitlines()
    conversations = [json.loads(line)["messages"] for line in lines]
    whole = [chat_prompt(decoder.tokenizer, messages) for messages in conversations]
    end = length // 4  # holds the request
    return [tokens[: length - end] + tokens[-end:] for tokens in whole]


def decoded(decoder: forerun.Decoder, prompt: Sequence[int], new: int) -> Run:
    """Decode a prompt, which is known but for its last tokens if it was decoded before."""
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    request = replace(decoder.request(list(prompt), params), cache_salt=SALT)
    steps = [step for batch in decoder.session.add([request]) for _, step in batch]
    tokens = [token for step in steps for token in step.tokens]
    later = steps[1:]  # the first one may read the prompt
    seconds = sum(step.seconds for step in later)
    count = sum(len(step.tokens) for step in later)
    drafted = sum(step.drafted for step in later) / len(later)
    return Run(tokens, 1000 * seconds / count, drafted)


def variants(target: str) -> dict[str, forerun.Decoder]:
    """Return the decoders that take turns."""
    decoder = forerun.load(target)
    decoder.generate("def", max_new_tokens=8)  # measures costs
    if decoder.costs is None or decoder.costs.far is None:
        raise SystemExit(f"the method of {target} asks for no costs after long texts")
    near = decoder.replace(costs=replace(decoder.costs, far=None))
    return {"ar": decoder.replace(method="ar"), "hybrid": decoder, "hybrid, short costs": near}


def measured(target: str, length: int, new: int, rounds: int) -> dict[str, Any]:
    """Return the figures of each variant after texts of a length."""
    decoders = variants(target)
    runs: dict[str, list[Run]] = {name: [] for name in decoders}
    for place, prompt in enumerate(prompts(decoders["ar"], length)):
        for decoder in decoders.values():
            decoded(decoder, prompt, new)  # reads the prompt, and warms up
        for number in range(rounds):
            for name in turned(list(decoders), number, place):
                runs[name].append(decoded(decoders[name], prompt, new))
    plain = runs["ar"]
    return {
        name: {
            "token_ms": round(median(run.token_ms for run in method_runs), 2),
            "speedup": _ratio(plain, method_runs),
            "over_hybrid": _ratio(runs["hybrid"], method_runs),
            "drafted_a_step": round(median(run.drafted for run in method_runs), 2),
            "same_tokens": all(
                run.tokens == other.tokens for run, other in zip(method_runs, plain, strict=True)
            ),
            "runs": len(method_runs),
        }
        for name, method_runs in runs.items()
    }


def _ratio(others: Sequence[Run], runs: Sequence[Run]) -> float:
    """Return how many times as fast as the others the runs are: the median of pairs."""
    pairs = zip(others, runs, strict=True)
    return round(median(other.token_ms / run.token_ms for other, run in pairs), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="qwen-coder")
    parser.add_argument("--lengths", default="512,8192")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    arguments = {key: value for key, value in vars(options).items() if key != "out"}
    record: dict[str, Any] = {"lengths": {}, **provenance(arguments)}
    for length in map(int, options.lengths.split(",")):
        figures = measured(options.target, length, options.new_tokens, options.rounds)
        record["lengths"][str(length)] = figures
        write_text(options.out, json.dumps(record, indent=1) + "\n")
        print(length, json.dumps(figures, indent=1), flush=True)


if __name__ == "__main__":
    main()
