"""LangChain's agent with two tools, whole and streamed, as one line of JSON.

It runs in an environment of its own.
"""

import json
import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL, MODEL = sys.argv[1:]
called: list[list[object]] = []


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    called.append(["get_weather", {"city": city}])
    return "sunny"


@tool
def count(x: int) -> int:
    """Count."""
    called.append(["count", {"x": x}])
    return x + 1


found = []
for streaming in (False, True):
    model = ChatOpenAI(
        base_url=URL, api_key="none", model=MODEL, max_retries=0, streaming=streaming
    )
    agent = create_agent(model, tools=[get_weather, count])
    found.append(agent.invoke({"messages": [("user", "hello")]})["messages"][-1].content)
print(json.dumps({"called": called, "answers": found}))
