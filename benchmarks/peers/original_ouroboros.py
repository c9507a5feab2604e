"""Ours beside the original Ouroboros (`ourodec` 0.1.0) on the embedded pair: the same prompts in turns, two processes.

    python -m venv other
    other/bin/pip install --no-deps ourodec==0.1.0 transformers==4.37.1
    other/bin/pip install torch "tokenizers<0.19" "huggingface_hub<1" "numpy<2" regex requests tqdm pyyaml safetensors
    python benchmarks/peers/original_ouroboros.py --python other/bin/python --out original.json

The original's `KVCacheModelLade.rollback` counts on 32 layers; it is replaced by one that takes as many as there are.
The other process loads both models through the original's own Llama class, in float32, with all threads, and waits for
prompts on its stdin; one process computes at a time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

PLAIN = "original, plain decoding"  # its transformers' own greedy search
# The defaults of the original; then smaller ones, chosen on validation prompts of the standard library.
THEIRS = {
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
    """In the original's environment: reads {prompt, tokens, settings} a line, answers with {tokens, seconds}."""
    import torch
    from ouroboros.cache_engine import CacheEngine
    from ouroboros.kv_cache_model import KVCacheModelLade
    from ouroboros.models import LlamaForCausalLM
    from ouroboros.ouroboros import ouroboros
    from transformers import LlamaForCausalLM as PlainLlama

    def rollback(self, end: int) -> None:  # the original's own takes it that a draft has 32 layers
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
        asked = json.loads(line)
        settings, prompt = asked["settings"], torch.tensor([asked["prompt"]])
        if settings is not None:
            key = json.dumps(settings)
            if asked["fresh"] or key not in pools:
                pools[key] = CacheEngine(settings["lookahead_level"], settings["guess_set_size"])
        begun = perf_counter()
        if settings is None:
            mask = torch.ones_like(prompt)
            output = plain.generate(
                prompt,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=asked["tokens"],
                eos_token_id=None,
                pad_token_id=0,
            )
        else:
            output = ouroboros(
                prompt,
                *models,
                ngram_cache=pools[key],
                max_len=asked["tokens"],
                eos_token_id=-1,
                **settings,
            )
        seconds = perf_counter() - begun
        print(
            json.dumps({"tokens": output[0, prompt.shape[1] :].tolist(), "seconds": seconds}),
            flush=True,
        )


def export(folder: Path) -> None:
    """The embedded pair as folders that the original's transformers reads: that has no head size of its own, so the
    draft gets one head more, of zeros."""
    from safetensors.torch import load_file, save_file
    from torch.nn import functional

    from forerun.api.loading import load_model

    for part in ("target", "draft"):
        model = load_model("embedded", part)
        model.save_pretrained(folder / part)
        weights, size = load_file(folder / part / "model.safetensors"), model.config.hidden_size
        for name, weight in weights.items():
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                weights[name] = functional.pad(weight, (0, 0, 0, size - weight.shape[0]))
            elif name.endswith("o_proj.weight"):
                weights[name] = functional.pad(weight, (0, size - weight.shape[1]))
        save_file(weights, folder / part / "model.safetensors", {"format": "pt"})
        path = folder / part / "config.json"
        config = json.loads(path.read_text())
        config |= {
            "rope_theta": config.pop("rope_parameters")["rope_theta"],
            "architectures": ["LlamaForCausalLM"],
        }
        heads = size // config.pop("head_dim")
        config |= {"pad_token_id": None, "torch_dtype": "float32"}
        config |= {"num_attention_heads": heads, "num_key_value_heads": heads}
        path.write_text(json.dumps(config))


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
    from forerun.bench.measure import forget_phrases
    from forerun.train.corpus import held_out_prompts

    ar = forerun.load(method="ar")
    ours = {
        "ar": ar,
        "ouroboros": forerun.load(method="ouroboros", guard=False, **json.loads(args.ours)),
        "pacer-ouroboros": forerun.load(method="pacer-ouroboros", guard=False),
    }
    prompts = {
        f"stdlib-{args.split}": held_out_prompts(ar.tokenizer, args.split, args.prompts, 128)
    }
    if args.humaneval is not None:
        from forerun.bench.datasets import read_files

        (rows,) = read_files([str(args.humaneval)], args.prompts).values()
        prompts["humaneval"] = [ar.tokenizer(row.text)["input_ids"] for row in rows]
    with tempfile.TemporaryDirectory() as name:
        export(Path(name))
        command = [args.python, __file__, "--serve", name]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdin is not None and other.stdout is not None
            while other.stdout.readline() != "ready\n":
                assert other.poll() is None, "the original did not start"

            def theirs(
                prompt: list[int], settings: dict | None, tokens: int, fresh: bool
            ) -> tuple[list[int], float]:
                other.stdin.write(
                    json.dumps(
                        {"prompt": prompt, "settings": settings, "tokens": tokens, "fresh": fresh}
                    )
                    + "\n"
                )
                other.stdin.flush()
                answer = json.loads(other.stdout.readline())
                return answer["tokens"], answer["seconds"]

            found = []
            for dataset, rows in prompts.items():
                for at, prompt in enumerate([rows[0], *rows]):  # the first time warms up
                    prompt = list(prompt)
                    if at == 1:
                        for decoder in ours.values():
                            forget_phrases(decoder)
                            decoder.close()  # with the KV of earlier prompts
                    row = {"dataset": dataset, "prompt": at - 1}
                    for each, decoder in ours.items():
                        begun = perf_counter()
                        done = decoder.generate(prompt, max_new_tokens=args.tokens, ignore_eos=True)
                        row[each] = {"seconds": perf_counter() - begun, "tokens": done.tokens}
                    for each, settings in {PLAIN: None, **THEIRS}.items():
                        tokens, seconds = theirs(prompt, settings, args.tokens, fresh=at < 2)
                        row[each] = {"seconds": seconds, "tokens": tokens[: args.tokens]}
                    if at:
                        found.append(row)
            other.stdin.close()
    report(found, args.tokens, args.out)


def report(found: list[dict], tokens: int, out: Path | None) -> None:
    """Tokens/s, ratios to ours and to each side's own plain decoding on the same prompt, and how many outputs equal
    plain decoding's."""
    from forerun.bench.report import versions

    names = [key for key in found[0] if key not in ("dataset", "prompt")]
    results = []
    for dataset in dict.fromkeys(row["dataset"] for row in found):
        rows = [row for row in found if row["dataset"] == dataset]
        for name in names:
            ratios = [row[name]["seconds"] / row["ouroboros"]["seconds"] for row in rows]
            own = PLAIN if name in (PLAIN, *THEIRS) else "ar"
            over = median(row[own]["seconds"] / row[name]["seconds"] for row in rows)
            equal = sum(row[name]["tokens"] == row["ar"]["tokens"] for row in rows)
            speed = median(len(row[name]["tokens"]) / row[name]["seconds"] for row in rows)
            results.append({"dataset": dataset, "method": name, "tokens_per_s": round(speed, 1)})
            results[-1] |= {
                "ours_faster": round(median(ratios), 3),
                "over_own_plain": round(over, 3),
            }
            results[-1] |= {"equal": f"{equal}/{len(rows)}"}
            print(
                f"{dataset:15} {name:34} {speed:7.1f} tokens/s  ours x {median(ratios):.3f}  own plain x {over:.3f}  "
                f"equal {equal}/{len(rows)}"
            )
    if out is not None:
        out.write_text(
            json.dumps(
                {"tokens": tokens, "theirs": THEIRS, "versions": versions(), "results": results},
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(Path(sys.argv[2]))
    else:
        main()
