"""A first comparison of methods and gammas on the embedded pair; the bench command will take its place.

Round-robin over the settings in one process, prompt by prompt, warm-up excluded; medians of per-prompt speedups over
plain decoding in the same round. `--split validation` is for choosing a setting, `--split test` for reporting it.
"""

from __future__ import annotations

import argparse
import json
from statistics import median

import forerun
from forerun.zoo.corpus import held_out_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--split", choices=("validation", "test"), default="validation")
    parser.add_argument("--settings", nargs="+", default=["sd:3", "sd:4", "sd:5", "sd:6", "sd:8", "lookup:8"])
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()

    decoders = {"ar": forerun.load(method="ar")}
    for setting in args.settings:
        name, _, gamma = setting.partition(":")
        decoders[setting] = forerun.load(method=name, **({"gamma": int(gamma)} if gamma else {}))
    prompts = held_out_prompts(decoders["ar"].tokenizer, args.split, args.prompts)
    options = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "ignore_eos": True}
    for decoder in decoders.values():
        decoder.generate(prompts[0], max_new_tokens=16)

    rates: dict[str, list[float]] = {name: [] for name in decoders}
    counts = {name: [0, 0, 0, 0] for name in decoders}
    equal = dict.fromkeys(decoders, 0)
    for number in range(args.rounds):
        for i, prompt in enumerate(prompts):
            outputs = {}
            for name, decoder in decoders.items():
                result = decoder.generate(prompt, seed=1000 * number + i, **options)
                outputs[name] = result.tokens
                rates[name].append(result.stats.tokens_per_s)
                stats = result.stats
                for k, value in enumerate((stats.tokens, stats.target_forwards, stats.accepted, stats.tested)):
                    counts[name][k] += value
            for name in decoders:
                equal[name] += outputs[name] == outputs["ar"]
    table = {}
    for name, (tokens, forwards, accepted, tested) in counts.items():
        table[name] = {
            "tokens_per_s": round(median(rates[name]), 1),
            "speedup": round(median(a / b for a, b in zip(rates[name], rates["ar"], strict=True)), 3),
            "tau": round(tokens / forwards, 3),
            "alpha": round(accepted / max(1, tested), 3),
            "equal": f"{equal[name]}/{len(rates[name])}",
        }
    print(json.dumps({"arguments": vars(args), "methods": table}, indent=1))


if __name__ == "__main__":
    main()
