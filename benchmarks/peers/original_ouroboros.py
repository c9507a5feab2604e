"""Our Ouroboros beside the original one (`ourodec` 0.1.0) on the embedded pair.

    python -m venv other
    other/bin/pip install --no-deps ourodec==0.1.0 transformers==4.37.1
    other/bin/pip install torch "tokenizers<0.19" "huggingface_hub<1" "numpy<2" regex requests \
        tqdm pyyaml safetensors
    python benchmarks/peers/original_ouroboros.py --python other/bin/python --out original.json

Both decode the same prompts in turns, in two processes, of which one computes at a time. The other
process loads both models through the original's own Llama class, in float32, with all threads, and
waits for prompts on its stdin. The original's `KVCacheModelLade.rollback` counts on 32 layers, so
it is replaced by one that takes as many as there are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

Row = dict[str, Any]

PLAIN = "original, plain decoding"  # greedy search of the original's transformers
# The defaults of the original, then smaller settings that were chosen on validation prompts of the
# standard library.
THEIRS: dict[str, dict[str, int]] = {
    "default": {
        "gamma": 12,
        "window_size": 20,
        "guess_set_size": 20,
        "lookahead_level": 7,
        "topk": 3,
    },
    "gamma 12, W = G = 5, L = 5": {
        "gamma": 12,
        "window_size": 5,
        "guess_set_size": 5,
        "lookahead_level": 5,
        "topk": 3,
    },
    "gamma 6, W = G = 3, L = 4, K = 1": {
        "gamma": 6,
        "window_size": 3,
        "guess_set_size": 3,
        "lookahead_level": 4,
        "topk": 1,
    },
}


def serve(folder: Path) -> None:
    """Answer lines of {prompt, tokens, settings, fresh} with {tokens, seconds}.

    It runs in the original's environment.
    """
    import torch
    from ouroboros.cache_engine import CacheEngine
    from ouroboros.kv_cache_model import KVCacheModelLade
    from ouroboros.models import LlamaForCausalLM
    from ouroboros.ouroboros import ouroboros
    from transformers import LlamaForCausalLM as PlainLlama

    def rollback(self: Any, end: int) -> None:
        kept = [(k[:, :, :end], v[:, :, :end]) for k, v in self.ctx["past_key_values"]]
        self.ctx["past_key_values"] = kept

    KVCacheModelLade.rollback = rollback
    models = [
        LlamaForCausalLM.from_pretrained(folder / part, torch_dtype=torch.float32)
        for part in ("draft", "target")
    ]
    for model in models:
        model.eval()
        model.config.pad_token_id = None
    plain = PlainLlama.from_pretrained(folder / "target", torch_dtype=torch.float32).eval()
    pools: dict[str, CacheEngine] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        settings = question["settings"]
        prompt = torch.tensor([question["prompt"]])
        key = json.dumps(settings)
        if settings is not None and (question["fresh"] or key not in pools):
            pools[key] = CacheEngine(settings["lookahead_level"], settings["guess_set_size"])
        started_at = perf_counter()
        if settings is None:
            output = plain.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=question["tokens"],
                eos_token_id=None,
                pad_token_id=0,
            )
        else:
            output = ouroboros(
                prompt,
                *models,
                ngram_cache=pools[key],
                max_len=question["tokens"],
                eos_token_id=-1,
                **settings,
            )
        seconds = perf_counter() - started_at
        answer = {"tokens": output[0, prompt.shape[1] :].tolist(), "seconds": seconds}
        print(json.dumps(answer), flush=True)


def export(folder: Path) -> None:
    """Write the embedded pair as folders that the original's transformers reads.

    That version has no head size of its own, so the draft gets one more head, of zeros.
    """
    from safetensors.torch import load_file, save_file
    from torch.nn import functional

    from forerun.api.loading import load_model

    for part in ("target", "draft"):
        model = load_model("embedded", part)
        model.save_pretrained(folder / part)
        path = folder / part / "model.safetensors"
        weights = load_file(path)
        size = model.config.hidden_size
        for name, weight in weights.items():
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                weights[name] = functional.pad(weight, (0, 0, 0, size - weight.shape[0]))
            elif name.endswith("o_proj.weight"):
                weights[name] = functional.pad(weight, (0, size - weight.shape[1]))
        save_file(weights, path, {"format": "pt"})
        _rewrite_config(folder / part / "config.json", size)


def _rewrite_config(path: Path, size: int) -> None:
    config = json.loads(path.read_text())
    heads = size // config.pop("head_dim")
    config |= {
        "rope_theta": config.pop("rope_parameters")["rope_theta"],
        "architectures": ["LlamaForCausalLM"],
        "pad_token_id": None,
        "torch_dtype": "float32",
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    path.write_text(json.dumps(config))


class Original:
    """The process of the original."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None, "the original did not start"

    def decode(
        self, prompt: list[int], settings: dict[str, int] | None, tokens: int, fresh: bool
    ) -> Row:
        """Return the seconds and at most `tokens` tokens of an answer.

        Args:
            prompt: its tokens.
            settings: those of Ouroboros; None for plain decoding.
            tokens: the number of new tokens.
            fresh: whether to forget the phrases of earlier prompts.
        """
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        question = {"prompt": prompt, "settings": settings, "tokens": tokens, "fresh": fresh}
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        return {"seconds": answer["seconds"], "tokens": answer["tokens"][:tokens]}


@contextmanager
def original(python: str) -> Iterator[Original]:
    """Start the original with the embedded pair in another environment's Python."""
    with tempfile.TemporaryDirectory() as folder:
        export(Path(folder))
        command = [python, __file__, "--serve", folder]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            yield Original(process)
            assert process.stdin is not None
            process.stdin.close()


def run(
    ours: dict[str, Any], peer: Original, dataset: str, prompts: list[list[int]], tokens: int
) -> list[Row]:
    """Return the outputs and seconds of all methods for each prompt."""
    from forerun.bench.measure import forget_phrases

    rows = []
    for turn, tokens_of_prompt in enumerate([prompts[0], *prompts]):  # the first turn warms up
        prompt = list(tokens_of_prompt)
        if turn == 1:
            for decoder in ours.values():
                forget_phrases(decoder)
                decoder.close()  # with the KV of earlier prompts
        row: Row = {"dataset": dataset, "prompt": turn - 1}
        for name, decoder in ours.items():
            started_at = perf_counter()
            completion = decoder.generate(prompt, max_new_tokens=tokens, ignore_eos=True)
            row[name] = {"seconds": perf_counter() - started_at, "tokens": completion.tokens}
        for name, settings in {PLAIN: None, **THEIRS}.items():
            row[name] = peer.decode(prompt, settings, tokens, fresh=turn < 2)
        if turn:
            rows.append(row)
    return rows


def report(rows: list[Row], tokens: int, out: Path | None) -> None:
    """Print and write the comparison of all methods.

    It has tokens/s, ratios to our Ouroboros and to each side's own plain decoding on the same
    prompt, and how many outputs equal plain decoding's.
    """
    from forerun.bench.report import versions

    names = [key for key in rows[0] if key not in ("dataset", "prompt")]
    results = []
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        some = [row for row in rows if row["dataset"] == dataset]
        for name in names:
            result = {"dataset": dataset, "method": name, **compared(name, some)}
            results.append(result)
            print(
                f"{dataset:15} {name:34} {result['tokens_per_s']:7.1f} tokens/s  "
                f"ours x {result['ours_faster']:.3f}  own plain x {result['over_own_plain']:.3f}  "
                f"equal {result['equal']}"
            )
    if out is not None:
        record = {"tokens": tokens, "theirs": THEIRS, "versions": versions(), "results": results}
        out.write_text(json.dumps(record, indent=1) + "\n")


def compared(name: str, rows: list[Row]) -> dict[str, Any]:
    """Return the figures of one method on one dataset."""
    plain = PLAIN if name in (PLAIN, *THEIRS) else "ar"
    speed = median(len(row[name]["tokens"]) / row[name]["seconds"] for row in rows)
    ours_faster = median(row[name]["seconds"] / row["ouroboros"]["seconds"] for row in rows)
    over_plain = median(row[plain]["seconds"] / row[name]["seconds"] for row in rows)
    equal = sum(row[name]["tokens"] == row["ar"]["tokens"] for row in rows)
    return {
        "tokens_per_s": round(speed, 1),
        "ours_faster": round(ours_faster, 3),
        "over_own_plain": round(over_plain, 3),
        "equal": f"{equal}/{len(rows)}",
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--humaneval", type=Path, help="HumanEval.jsonl.gz")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ours", default="{}", help="settings of ouroboros, as JSON")
    args = parser.parse_args()
    import forerun
    from forerun.train.corpus import held_out_prompts

    plain = forerun.load(method="ar")
    ours = {
        "ar": plain,
        "ouroboros": forerun.load(method="ouroboros", guard=False, **json.loads(args.ours)),
        "pacer-ouroboros": forerun.load(method="pacer-ouroboros", guard=False),
    }
    prompts = {
        f"stdlib-{args.split}": held_out_prompts(plain.tokenizer, args.split, args.prompts, 128)
    }
    if args.humaneval is not None:
        from forerun.bench.datasets import read_files

        (problems,) = read_files([str(args.humaneval)], args.prompts).values()
        prompts["humaneval"] = [plain.tokenizer(problem.text)["input_ids"] for problem in problems]
    rows: list[Row] = []
    with original(args.python) as peer:
        for dataset, some in prompts.items():
            rows += run(ours, peer, dataset, some, args.tokens)
    report(rows, args.tokens, args.out)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(Path(sys.argv[2]))
    else:
        main()
