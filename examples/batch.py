"""A batch of prompts, padded on the left; each row says what it would say alone."""

import argparse

import forerun
from forerun.api.loading import load_model, load_tokenizer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--target", default="embedded", help="folder or hub id; by default the embedded pair's target"
)
parser.add_argument(
    "--draft", default="embedded", help="a smaller model with the target's vocabulary"
)
parser.add_argument(
    "--prompts",
    nargs="+",
    default=["def add(a, b):\n", "class Stack:\n", "import os\n\nfor name in"],
)
parser.add_argument("--max-new-tokens", type=int, default=64)
args = parser.parse_args()

# Any AutoTokenizer and AutoModelForCausalLM will do; these loaders know the embedded pair too.
tokenizer = load_tokenizer(args.target)
model, draft = load_model(args.target, "target"), load_model(args.draft, "draft")
inputs = tokenizer(args.prompts, return_tensors="pt", padding=True, padding_side="left").to(
    model.device
)

stats = []
output = model.generate(
    **inputs,
    do_sample=False,
    max_new_tokens=args.max_new_tokens,
    custom_generate=forerun.custom_generate,
    draft=draft,
    stats=stats,
)
for ids, row in zip(output, stats, strict=True):
    print(tokenizer.decode(ids, skip_special_tokens=True))
    print(f"--- {row.tokens} tokens, {row.tau:.2f} a target forward\n")
