"""llama.cpp's own drafts in its server's engine, from the wheel `xllamacpp` (AVX2): the draft model, every n-gram type.

    python -m venv xllama && xllama/bin/pip install xllamacpp
    xllama/bin/python benchmarks/peers/xllama.py PROMPTS.jsonl --models ~/.cache/forerun/models --out FILE.json

Each setting answers the same prompts greedily; plain decoding comes first and last. Needs no forerun.
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
KEPT = ("prompt_ms", "predicted_ms", "draft_n", "draft_n_accepted")
NGRAMS = ("ngram_simple", "ngram_map_k", "ngram_map_k4v")
SETTINGS = [
    "plain",
    *(
        f"draft_simple/{sizes}"
        for sizes in ("1/0", "1/0.6", "1/0.9", "2/0", "2/0.6", "3/0.9", "8/0.9")
    ),
    *(f"{kind}/{sizes}" for kind in NGRAMS for sizes in ("3/4", "12/48")),
    "ngram_mod/3/4",
    "ngram_mod/24/64",
    "ngram_cache",
    "plain",
]


def server(models: Path, setting: str, threads: int) -> Any:
    """Load the models of a setting: "draft_simple/tokens/least probability", or of n-grams "type/matched/drafted"."""
    kind, *given = setting.split("/")
    asked = llama.CommonParams()
    asked.model.path, asked.n_ctx, asked.n_parallel = str(models / TARGET), 2048, 1
    asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = threads
    speculative = asked.speculative
    if kind != "plain":
        prefix = "" if kind.startswith("ngram") else "DRAFT_"
        name = f"COMMON_SPECULATIVE_TYPE_{prefix}{kind.removeprefix('draft_').upper()}"
        speculative.types = [getattr(llama.common_speculative_type, name)]
    if kind == "draft_simple":
        draft = speculative.draft
        draft.mparams.path, draft.n_max, draft.p_min = (
            str(models / DRAFT),
            int(given[0]),
            float(given[1]),
        )
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = threads
    elif kind in NGRAMS:
        ngrams = getattr(speculative, kind)
        ngrams.size_n, ngrams.size_m = map(int, given)
    elif kind == "ngram_mod":
        ngrams = speculative.ngram_mod
        ngrams.n_match, ngrams.n_max, ngrams.n_min = int(given[0]), int(given[1]), 1
    return llama.Server(asked)


def rendered(messages: list[dict[str, str]]) -> str:
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": SYSTEM}, *messages]
    return "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in map(dict.values, messages)
    ) + ("<|im_start|>assistant\n")


def answered(engine: Any, text: str, most: int) -> dict[str, float]:
    asked = {"prompt": text, "n_predict": most, "temperature": 0.0, "cache_prompt": False}
    begun = perf_counter()
    times = engine.handle_completions(asked)["timings"]
    found = {"seconds": perf_counter() - begun, "tokens": times["predicted_n"]}
    return found | {key: times[key] for key in KEPT if key in times}


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
    given = parser.parse_args()
    lines = given.prompts.read_text(encoding="utf-8").splitlines()[: given.limit]
    texts = [rendered(json.loads(line)["messages"]) for line in lines]
    runs: list[dict[str, Any]] = []
    for setting in given.settings.split(","):
        engine = server(given.models, setting, given.threads)
        answered(engine, texts[0], 8)
        calls = [answered(engine, text, given.tokens) for text in texts]
        rate = median(call["tokens"] / call["seconds"] for call in calls)
        runs.append({"setting": setting, "tokens/s": rate, "calls": calls})
        print(f"{setting}: {rate:.2f} tokens/s", flush=True)
        del engine
        about = {
            "xllamacpp": version("xllamacpp"),
            "processor": llama.get_system_info(),
            "runs": runs,
        }
        given.out.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
