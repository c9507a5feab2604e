"""Streaming: text as it is written, through one of transformers' streamers, up to a stop string."""

import argparse

from transformers import StoppingCriteriaList, StopStringCriteria, TextStreamer

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

# generate() passes neither `streamer` nor `stop_strings` on to a custom loop; these replace them.
stats = []
model.generate(
    **inputs,
    do_sample=False,
    max_new_tokens=args.max_new_tokens,
    custom_generate=forerun.custom_generate,
    draft=draft,
    token_streamer=TextStreamer(tokenizer, skip_special_tokens=True),
    stopping_criteria=StoppingCriteriaList([StopStringCriteria(tokenizer, ["\n\n\n"])]),
    stats=stats,
)
print(f"{stats[0].tokens_per_s:.0f} tokens/s, {stats[0].tau:.2f} tokens a target forward")
