"""Greedy decoding: the tokens of transformers' own generate, with fewer forwards of the target."""

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
parser.add_argument("--prompt", default="def quicksort(items):\n")
parser.add_argument("--max-new-tokens", type=int, default=64)
args = parser.parse_args()

# Any AutoTokenizer and AutoModelForCausalLM will do; these loaders know the embedded pair too.
tokenizer = load_tokenizer(args.target)
model, draft = load_model(args.target, "target"), load_model(args.draft, "draft")
inputs = tokenizer(args.prompt, return_tensors="pt").to(model.device)
settings = {"do_sample": False, "max_new_tokens": args.max_new_tokens}

stats = []
ids = model.generate(
    **inputs, **settings, custom_generate=forerun.custom_generate, draft=draft, stats=stats
)
plain = model.generate(**inputs, **settings)

print(tokenizer.decode(ids[0], skip_special_tokens=True))
print(f"\nsame tokens as plain generate: {ids.tolist() == plain.tolist()}")
accepted = f"{stats[0].alpha:.0%} of the tested draft tokens accepted"
print(f"{stats[0].tau:.2f} tokens per target forward, {accepted}")
