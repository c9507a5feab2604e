"""LiteLLM as a client: an answer, the same streamed, and an error, as one line of JSON.

It runs in an environment of its own, because it requires an older `openai`.
"""

import json
import sys

import litellm

URL, MODEL = sys.argv[1:]
ASKED = {
    "model": f"openai/{MODEL}",
    "api_base": URL,
    "api_key": "none",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 6,
    "temperature": 0,
    "num_retries": 0,
}

answer = litellm.completion(**ASKED).choices[0]
chunks = list(litellm.completion(**ASKED, stream=True))
try:
    litellm.completion(**ASKED | {"max_tokens": 0})
    error = {}
except litellm.BadRequestError as raised:
    error = {"status": raised.status_code, "message": str(raised)}
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
print(
    json.dumps(
        {
            "answer": answer.message.content,
            "reason": answer.finish_reason,
            "streamed": streamed,
            "error": error,
        }
    )
)
