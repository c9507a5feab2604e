"""llama.cpp's own drafts in the engine of its server, from the wheel `xllamacpp` (AVX2).

    python -m venv xllama && xllama/bin/pip install xllamacpp
    xllama/bin/python benchmarks/peers/xllama.py PROMPTS.jsonl \
        --models ~/.cache/forerun/models --out FILE.json

It tries the draft model and every type of n-gram drafts. Each setting answers the same prompts
greedily; plain decoding runs first and last. The script needs no forerun.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import xllamacpp as llama

TARGET = "qwen-coder/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
DRAFT = "qwen-coder-draft/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
CONTEXT = 2048
KEPT = ("prompt_ms", "predicted_ms", "draft_n", "draft_n_accepted")
NGRAMS = ("ngram_simple", "ngram_map_k", "ngram_map_k4v")
DRAFT_SIZES = ("1/0", "1/0.6", "1/0.9", "2/0", "2/0.6", "3/0.9", "8/0.9")
SETTINGS = [
    "plain",
    *(f"draft_simple/{sizes}" for sizes in DRAFT_SIZES),
    *(f"{kind}/{sizes}" for kind in NGRAMS for sizes in ("3/4", "12/48")),
    "ngram_mod/3/4",
    "ngram_mod/24/64",
    "ngram_cache",
    "plain",
]


def server(models: Path, setting: str, threads: int) -> Any:
    """Load the models of a setting.

    A setting is "draft_simple/TOKENS/LEAST PROBABILITY", or of n-grams "TYPE/MATCHED/DRAFTED".
    """
    kind, *sizes = setting.split("/")
    params = llama.CommonParams()
    params.model.path = str(models / TARGET)
    params.n_ctx = CONTEXT
    params.n_parallel = 1
    set_threads(params, threads)
    speculative = params.speculative
    if kind != "plain":
        prefix = "" if kind.startswith("ngram") else "DRAFT_"
        name = f"COMMON_SPECULATIVE_TYPE_{prefix}{kind.removeprefix('draft_').upper()}"
        speculative.types = [getattr(llama.common_speculative_type, name)]
    if kind == "draft_simple":
        draft = speculative.draft
        draft.mparams.path = str(models / DRAFT)
        draft.n_max = int(sizes[0])
        draft.p_min = float(sizes[1])
        set_threads(draft, threads)
    elif kind in NGRAMS:
        ngrams = getattr(speculative, kind)
        ngrams.size_n, ngrams.size_m = map(int, sizes)
    elif kind == "ngram_mod":
        ngrams = speculative.ngram_mod
        ngrams.n_match = int(sizes[0])
        ngrams.n_max = int(sizes[1])
        ngrams.n_min = 1
    return llama.Server(params)


def set_threads(params: Any, threads: int) -> None:
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads


def rendered(messages: list[dict[str, str]]) -> str:
    """Return messages as Qwen's chat template renders them."""
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": SYSTEM}, *messages]
    turns = [
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages
    ]
    return "".join(turns) + "<|im_start|>assistant\n"


def answered(engine: Any, text: str, most: int) -> dict[str, float]:
    """Return the seconds and tokens of one answer, and what the engine says of it."""
    request = {"prompt": text, "n_predict": most, "temperature": 0.0, "cache_prompt": False}
    started_at = perf_counter()
    timings = engine.handle_completions(request)["timings"]
    call = {"seconds": perf_counter() - started_at, "tokens": timings["predicted_n"]}
    return call | {key: timings[key] for key in KEPT if key in timings}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", type=Path, help="lines with `messages`")
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    lines = args.prompts.read_text(encoding="utf-8").splitlines()[: args.limit]
    texts = [rendered(json.loads(line)["messages"]) for line in lines]
    runs: list[dict[str, Any]] = []
    for setting in args.settings.split(","):
        engine = server(args.models, setting, args.threads)
        answered(engine, texts[0], 8)
        calls = [answered(engine, text, args.tokens) for text in texts]
        rate = median(call["tokens"] / call["seconds"] for call in calls)
        runs.append({"setting": setting, "tokens/s": rate, "calls": calls})
        print(f"{setting}: {rate:.2f} tokens/s", flush=True)
        del engine
        results = {
            "xllamacpp": version("xllamacpp"),
            "processor": llama.get_system_info(),
            "runs": runs,
        }
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
