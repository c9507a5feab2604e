"""The openai package against a local server: an answer as it comes, and what the drafts were worth.

Start `forerun serve` first; needs `pip install openai`.
"""

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:8000")
parser.add_argument("--key", default="none", help="what the server was given as --api-key")
parser.add_argument("--question", default="Why do cats purr?")
parser.add_argument("--max-new-tokens", type=int, default=128)
args = parser.parse_args()

client = OpenAI(base_url=f"{args.url}/v1", api_key=args.key)
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": args.question}],
    temperature=0,
    max_tokens=args.max_new_tokens,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage:
        details = chunk.usage.completion_tokens_details
        print(f"\n\n{chunk.usage.completion_tokens} tokens", end="")
        if details and details.accepted_prediction_tokens is not None:
            rejected = details.rejected_prediction_tokens
            accepted = details.accepted_prediction_tokens
            print(f": {accepted} were drafted and accepted, {rejected} rejected", end="")
print()
