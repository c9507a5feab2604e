"""Anthropic's client for Python, on its Messages API."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic
import tries

CLIENT = anthropic.Anthropic(base_url=tries.SERVER, api_key=tries.KEY, max_retries=0, timeout=300)
USER: list[Any] = [{"role": "user", "content": tries.HELLO}]
TOOL: Any = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
    },
}


def asked(tokens: int = 200, **more: Any) -> dict[str, Any]:
    greedy = {"extra_body": {"temperature": 0}}  # which newer versions have no argument for
    return {"model": tries.MODEL, "messages": USER, "max_tokens": tokens, **greedy, **more}


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def models() -> None:
    assert [model.id for model in CLIENT.models.list()] == [tries.MODEL]


def chat() -> str:
    whole = CLIENT.messages.create(**asked(tries.TOKENS))
    with CLIENT.messages.stream(**asked(tries.TOKENS)) as stream:
        streamed = "".join(stream.text_stream)
        assert stream.get_final_message().usage == whole.usage
    return tries.same(streamed, text_of(whole))


def counted() -> None:
    count = CLIENT.messages.count_tokens(model=tries.MODEL, messages=USER)
    whole = CLIENT.messages.create(**asked(1))
    assert count.input_tokens == whole.usage.input_tokens


def ended() -> None:
    text = text_of(CLIENT.messages.create(**asked(tries.TOKENS)))
    stop = re.findall("[a-z]{2}", text)[0]
    message = CLIENT.messages.create(**asked(tries.TOKENS, stop_sequences=[stop]))
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == stop
    assert text_of(message) == text[: text.index(stop)]


def tools() -> None:
    """A conversation with a tool, whole and streamed."""
    for is_streamed in (False, True):
        messages: list[Any] = [{"role": "user", "content": tries.WEATHER}]
        cities: list[object] = []
        message = None
        for _ in range(3):
            body = asked(messages=messages, tools=[TOOL])
            if is_streamed:
                with CLIENT.messages.stream(**body) as stream:
                    message = stream.get_final_message()
            else:
                message = CLIENT.messages.create(**body)
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                break
            assert message.stop_reason == "tool_use"
            cities += [call.input["city"] for call in calls]
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
                for call in calls
            ]
            messages += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": results},
            ]
        assert message is not None
        tries.check_agent(cities, text_of(message))


def forced() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        message = CLIENT.messages.create(**asked(tools=[TOOL], tool_choice=choice))
        calls = [block for block in message.content if block.type == "tool_use"]
        assert calls and all(isinstance(call.input["city"], str) for call in calls)


def structured() -> None:
    user = [{"role": "user", "content": tries.PERSON}]
    form = {"format": {"type": "json_schema", "schema": tries.SCHEMA}}
    person = json.loads(text_of(CLIENT.messages.create(**asked(messages=user, output_config=form))))
    tries.check_person(person["job"], person["age"])


def refused() -> None:
    try:
        CLIENT.messages.create(**asked(0))
    except anthropic.APIStatusError as error:
        tries.check_refusal(error, error.status_code, anthropic.BadRequestError)
    else:
        raise AssertionError("it was not refused")


tries.run(
    ["anthropic"],
    {
        "models": models,
        "messages": chat,
        "`count_tokens`": counted,
        "`stop_sequences`": ended,
        "tools": tools,
        "forced calls": forced,
        "structured output": structured,
        "errors": refused,
    },
)
