"""OpenAI's client for Python."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import tries
from pydantic import BaseModel, Field

CLIENT = openai.OpenAI(base_url=tries.URL, api_key=tries.KEY, max_retries=0, timeout=300)
USER: list[Any] = [{"role": "user", "content": tries.HELLO}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Get the weather.", "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": FUNCTION}
FLAT_TOOL: Any = {"type": "function", "strict": True} | FUNCTION


class Person(BaseModel):
    job: Literal["engineer", "teacher"]
    age: int = Field(ge=0, le=150)


def models() -> None:
    assert tries.MODEL in [model.id for model in CLIENT.models.list()]
    assert CLIENT.models.retrieve(tries.MODEL).id == tries.MODEL


def chat() -> str:
    asked: dict[str, Any] = {"model": tries.MODEL, "messages": USER, "temperature": 0}
    asked["max_tokens"] = tries.TOKENS
    whole = CLIENT.chat.completions.create(**asked)
    assert whole.usage and whole.usage.completion_tokens <= tries.TOKENS
    streamed = ""
    usage = None
    options = {"include_usage": True}
    for chunk in CLIENT.chat.completions.create(**asked, stream=True, stream_options=options):
        usage = chunk.usage or usage
        streamed += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert usage and usage.total_tokens == whole.usage.total_tokens
    return tries.same(streamed, whole.choices[0].message.content or "")


def several() -> None:
    """Several answers with log probabilities and a seed."""
    answer = CLIENT.chat.completions.create(
        model=tries.MODEL, messages=USER, n=2, seed=1, logprobs=True, top_logprobs=2, max_tokens=4
    )
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.logprobs and choice.logprobs.content
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def completions() -> str:
    asked: dict[str, Any] = {"model": tries.MODEL, "prompt": tries.HELLO, "temperature": 0}
    asked["max_tokens"] = tries.TOKENS
    whole = CLIENT.completions.create(**asked).choices[0].text
    chunks = CLIENT.completions.create(**asked, stream=True)
    return tries.same("".join(chunk.choices[0].text for chunk in chunks), whole)


def responses() -> str:
    asked: dict[str, Any] = {"model": tries.MODEL, "input": tries.HELLO, "temperature": 0}
    asked["max_output_tokens"] = tries.TOKENS
    whole = CLIENT.responses.create(**asked).output_text
    with CLIENT.responses.stream(**asked) as stream:
        events = [event for event in stream if event.type == "response.output_text.delta"]
    return tries.same("".join(event.delta for event in events), whole)


def tools() -> None:
    """A conversation with a tool, whole and streamed."""
    for is_streamed in (False, True):
        messages: list[Any] = [{"role": "user", "content": tries.WEATHER}]
        calls: list[object] = []
        answer = ""
        for _ in range(3):
            asked: dict[str, Any] = {"model": tries.MODEL, "messages": messages, "tools": [TOOL]}
            asked |= {"temperature": 0, "max_tokens": 200}
            if is_streamed:
                with CLIENT.chat.completions.stream(**asked) as stream:
                    message = stream.get_final_completion().choices[0].message
            else:
                message = CLIENT.chat.completions.create(**asked).choices[0].message
            messages.append(message)
            if not message.tool_calls:
                answer = message.content or ""
                break
            for call in message.tool_calls:
                calls.append(json.loads(call.function.arguments)["city"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        tries.check_agent(calls, answer)


def response_tools() -> None:
    """The items of a response are sent back with the result."""
    items: list[Any] = [{"role": "user", "content": tries.WEATHER}]
    asked: dict[str, Any] = {"model": tries.MODEL, "tools": [FLAT_TOOL], "temperature": 0}
    asked["max_output_tokens"] = 200
    first = CLIENT.responses.create(input=items, **asked)
    calls = [item for item in first.output if item.type == "function_call"]
    items += first.output
    for call in calls:
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    second = CLIENT.responses.create(input=items, **asked)
    tries.check_agent([json.loads(call.arguments)["city"] for call in calls], second.output_text)


def forced() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = CLIENT.chat.completions.create(
            model=tries.MODEL, messages=USER, tools=[TOOL], tool_choice=choice, max_tokens=200
        )
        for call in answer.choices[0].message.tool_calls or ():
            assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        assert answer.choices[0].message.tool_calls


def parsed() -> None:
    """Structured output, as a chat, streamed and as a response."""
    user: list[Any] = [{"role": "user", "content": tries.PERSON}]
    asked: dict[str, Any] = {"model": tries.MODEL, "messages": user, "response_format": Person}
    asked |= {"temperature": 0, "max_tokens": 200}
    people = [CLIENT.chat.completions.parse(**asked).choices[0].message.parsed]
    with CLIENT.chat.completions.stream(**asked) as stream:
        people.append(stream.get_final_completion().choices[0].message.parsed)
    response = CLIENT.responses.parse(
        model=tries.MODEL, input=user, text_format=Person, temperature=0, max_output_tokens=200
    )
    people.append(response.output_parsed)
    for person in people:
        assert person is not None
        tries.check_person(person.job, person.age)


def refused() -> None:
    try:
        CLIENT.chat.completions.create(model=tries.MODEL, messages=USER, max_tokens=0)
    except openai.APIStatusError as error:
        tries.check_refusal(error, error.status_code, openai.BadRequestError)
    else:
        raise AssertionError("it was not refused")


tries.run(
    ["openai"],
    {
        "models": models,
        "chats": chat,
        "several answers, log probabilities": several,
        "completions": completions,
        "responses": responses,
        "tools": tools,
        "tools in responses": response_tools,
        "forced calls": forced,
        "`parse`": parsed,
        "errors": refused,
    },
)
