"""LangChain against a local server: a prompt template, a model and a parser in a chain, streamed.

Start `forerun serve` first; needs `pip install langchain-openai`.
"""

import argparse

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:8000")
parser.add_argument("--key", default="none", help="what the server was given as --api-key")
parser.add_argument("--model", default="smollm2", help="the name that /v1/models gives")
parser.add_argument("--subject", default="cats")
parser.add_argument("--max-new-tokens", type=int, default=128)
args = parser.parse_args()

prompt = ChatPromptTemplate.from_messages(
    [("system", "Answer briefly."), ("user", "Tell me a fact about {subject}.")]
)
model = ChatOpenAI(
    base_url=f"{args.url}/v1",
    api_key=args.key,
    model=args.model,
    temperature=0,
    max_tokens=args.max_new_tokens,
)
for text in (prompt | model | StrOutputParser()).stream({"subject": args.subject}):
    print(text, end="", flush=True)
print()
