"""Sampling: several independent draws for a prompt, the same again under the same seed."""

import argparse

import torch

import forerun
from forerun.api.loading import load_model, load_tokenizer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--target", default="embedded", help="folder or hub id; by default the embedded pair's target"
)
parser.add_argument(
    "--draft", default="embedded", help="a smaller model with the target's vocabulary"
)
parser.add_argument("--prompt", default="def quicksort(items):\n")
parser.add_argument("--max-new-tokens", type=int, default=64)
args = parser.parse_args()

# Any AutoTokenizer and AutoModelForCausalLM will do; these loaders know the embedded pair too.
tokenizer = load_tokenizer(args.target)
model, draft = load_model(args.target, "target"), load_model(args.draft, "draft")
inputs = tokenizer(args.prompt, return_tensors="pt").to(model.device)

torch.manual_seed(1)
stats = []
draws = model.generate(
    **inputs,
    do_sample=True,
    temperature=0.8,
    top_p=0.95,
    num_return_sequences=3,
    max_new_tokens=args.max_new_tokens,
    custom_generate=forerun.custom_generate,
    draft=draft,
    stats=stats,
)
for ids, row in zip(draws, stats, strict=True):
    print(tokenizer.decode(ids, skip_special_tokens=True))
    accepted = f"{row.alpha:.0%} of the tested draft tokens accepted"
    print(f"--- {row.tau:.2f} tokens per target forward, {accepted}\n")
