"""LiteLLM as a client."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched from elsewhere

import litellm
import tries
from pydantic import BaseModel, Field

USER = [{"role": "user", "content": tries.HELLO}]
ASKED: dict[str, Any] = {
    "api_base": tries.URL,
    "api_key": tries.KEY,
    "temperature": 0,
    "num_retries": 0,
}
PREFIXES = ("openai", "hosted_vllm", "custom_openai", "lm_studio", "llamafile")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


class Person(BaseModel):
    """A person."""

    job: Literal["engineer", "teacher"]
    age: int = Field(ge=0, le=150)


def completion(prefix: str = "openai", **more: Any) -> Any:
    asked = ASKED | {"model": f"{prefix}/{tries.MODEL}", "messages": USER, "max_tokens": 200}
    return litellm.completion(**asked | more)


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def chat() -> str:
    whole = completion(max_tokens=tries.TOKENS).choices[0].message.content
    return tries.same(text_of(completion(max_tokens=tries.TOKENS, stream=True)), whole)


def asynchronous() -> str:
    async def answer() -> Any:
        asked = ASKED | {
            "model": f"openai/{tries.MODEL}",
            "messages": USER,
            "max_tokens": tries.TOKENS,
        }
        return await litellm.acompletion(**asked)

    whole = completion(max_tokens=tries.TOKENS).choices[0].message.content
    return tries.same(asyncio.run(answer()).choices[0].message.content, whole)


def prefixes() -> None:
    whole = completion(max_tokens=tries.TOKENS).choices[0].message.content
    for prefix in PREFIXES:
        tries.same(completion(prefix, max_tokens=tries.TOKENS).choices[0].message.content, whole)


def completions() -> str:
    asked = ASKED | {"model": f"text-completion-openai/{tries.MODEL}", "prompt": tries.HELLO}
    asked["max_tokens"] = tries.TOKENS
    whole = litellm.text_completion(**asked).choices[0].text
    chunks = litellm.text_completion(**asked, stream=True)
    return tries.same("".join(chunk.choices[0].text or "" for chunk in chunks), whole)


def responses() -> str:
    asked = ASKED | {
        "model": f"openai/{tries.MODEL}",
        "input": tries.HELLO,
        "max_output_tokens": tries.TOKENS,
    }
    whole = litellm.responses(**asked).output_text
    events = litellm.responses(**asked, stream=True)
    kind = "response.output_text.delta"
    return tries.same("".join(event.delta for event in events if event.type == kind), whole)


def structured() -> None:
    user = [{"role": "user", "content": tries.PERSON}]
    answer = completion(messages=user, response_format=Person).choices[0].message.content
    person = Person.model_validate_json(answer)
    tries.check_person(person.job, person.age)


def tools() -> None:
    for stream in (False, True):
        messages: list[Any] = [{"role": "user", "content": tries.WEATHER}]
        response = completion(messages=messages, tools=[TOOL], stream=stream)
        if stream:
            response = litellm.stream_chunk_builder(list(response))
        message = response.choices[0].message
        calls = message.tool_calls or []
        messages.append(message.model_dump())
        results = {"role": "tool", "content": "sunny"}
        messages += [results | {"tool_call_id": call.id} for call in calls]
        last = completion(messages=messages, tools=[TOOL]).choices[0].message.content
        tries.check_agent([json.loads(call.function.arguments)["city"] for call in calls], last)


def refused() -> None:
    try:
        completion(max_tokens=0)
    except litellm.BadRequestError as error:
        tries.check_refusal(error, error.status_code, litellm.BadRequestError)
    else:
        raise AssertionError("it was not refused")


tries.run(
    ["litellm"],
    {
        "chats": chat,
        "`acompletion`": asynchronous,
        f"prefixes {', '.join(PREFIXES)}": prefixes,
        "completions": completions,
        "responses": responses,
        "structured output": structured,
        "tools": tools,
        "errors": refused,
    },
)
