"""Ollama's client for Python."""

from __future__ import annotations

import json
from typing import Any

import ollama
import tries

CLIENT = ollama.Client(host=tries.SERVER, timeout=300)
USER = [{"role": "user", "content": tries.HELLO}]
SHORT = {"temperature": 0, "num_predict": tries.TOKENS}
LONG = {"temperature": 0, "num_predict": 200}


def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: the city.
    """
    return "sunny"


def models() -> None:
    assert [model.model for model in CLIENT.list().models] == [tries.MODEL]
    assert [model.model for model in CLIENT.ps().models] == [tries.MODEL]
    assert "completion" in (CLIENT.show(tries.MODEL).capabilities or [])


def chat() -> str:
    whole = CLIENT.chat(tries.MODEL, USER, options=SHORT)
    parts = list(CLIENT.chat(tries.MODEL, USER, options=SHORT, stream=True))
    assert parts[-1].eval_count == whole.eval_count
    streamed = "".join(part.message.content or "" for part in parts)
    return tries.same(streamed, whole.message.content or "")


def generate() -> str:
    whole = CLIENT.generate(tries.MODEL, tries.HELLO, options=SHORT).response
    parts = CLIENT.generate(tries.MODEL, tries.HELLO, options=SHORT, stream=True)
    return tries.same("".join(part.response for part in parts), whole)


def tools() -> None:
    """A conversation with a function, whole and streamed."""
    for is_streamed in (False, True):
        messages: list[Any] = [{"role": "user", "content": tries.WEATHER}]
        cities: list[object] = []
        answer = ""
        for _ in range(3):
            body: dict[str, Any] = {"tools": [get_weather], "options": LONG}
            if is_streamed:
                parts = list(CLIENT.chat(tries.MODEL, messages, stream=True, **body))
            else:
                parts = [CLIENT.chat(tries.MODEL, messages, **body)]
            calls = [call for part in parts for call in part.message.tool_calls or ()]
            answer = "".join(part.message.content or "" for part in parts)
            if not calls:
                break
            cities += [call.function.arguments["city"] for call in calls]
            messages.append({"role": "assistant", "content": answer, "tool_calls": calls})
            messages += [
                {"role": "tool", "tool_name": "get_weather", "content": "sunny"} for _ in calls
            ]
        tries.check_agent(cities, answer)


def structured() -> None:
    user = [{"role": "user", "content": tries.PERSON}]
    for is_streamed in (False, True):
        parts: Any = CLIENT.chat(
            tries.MODEL, user, format=tries.SCHEMA, options=LONG, stream=is_streamed
        )
        texts = [part.message.content or "" for part in (parts if is_streamed else [parts])]
        person = json.loads("".join(texts))
        tries.check_person(person["job"], person["age"])


def vectors() -> None:
    many = CLIENT.embed(tries.MODEL, [tries.HELLO, tries.PERSON]).embeddings
    assert list(many[0]) == list(CLIENT.embed(tries.MODEL, tries.HELLO).embeddings[0])
    assert list(many[1]) == list(CLIENT.embeddings(tries.MODEL, tries.PERSON).embedding)


def refused() -> None:
    try:
        CLIENT.chat(tries.MODEL, USER, options={"num_predict": 0})
    except ollama.ResponseError as error:
        assert error.status_code == 400, error.status_code
        assert "num_predict" in str(error), str(error)
    else:
        raise AssertionError("it was not refused")


tries.run(
    ["ollama"],
    {
        "`list`, `ps`, `show`": models,
        "`chat`": chat,
        "`generate`": generate,
        "tools": tools,
        "structured output": structured,
        "`embed`, `embeddings`": vectors,
        "errors": refused,
    },
)
