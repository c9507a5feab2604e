"""Conversations of Ollama's API, as those of OpenAI's API."""

from __future__ import annotations

from typing import Any

_Call = tuple[str, str]  # its id and its function's name


def conversation(given: Any) -> Any:
    """Return the messages of a chat under a chat's names. Raises ValueError for images.

    Ollama's calls may lack an id, which some chat templates need. They get one, and so do their
    results: of the calls before them, the first one of the same function, else the first one.
    Anything that is not a message is passed on, because a chat's checks say what is wrong with it.
    """
    if not isinstance(given, list):
        return given
    waiting: list[_Call] = []  # calls that have no result yet
    count = 0
    messages = []
    for message in given:
        if not isinstance(message, dict):
            messages.append(message)
            continue
        chat_message = _renamed(message)
        if isinstance(chat_message.get("tool_calls"), list):
            calls = [_with_id(call, count + at) for at, call in enumerate(message["tool_calls"])]
            chat_message["tool_calls"] = calls
            waiting += [_identity(call) for call in calls if isinstance(call, dict)]
            count += len(calls)
        elif chat_message.get("role") == "tool":
            chat_message["tool_call_id"] = _answered(waiting, message)
        messages.append(chat_message)
    return messages


def check_images(images: Any) -> None:
    """Raise ValueError if there are images."""
    if images not in (None, []):
        raise ValueError("images are not supported: this model reads text only")


def _renamed(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with a chat's keys; those that nobody knows are left out."""
    check_images(message.get("images"))
    names = {"thinking": "reasoning_content", "tool_name": "name"}
    same = ("role", "content", "tool_calls", "tool_call_id")
    names |= {name: name for name in same}
    return {names[key]: value for key, value in message.items() if key in names}


def _with_id(call: Any, number: int) -> Any:
    """Return a call with an id. The one that is made is of the only shape that Mistral takes."""
    if not isinstance(call, dict) or call.get("id"):
        return call
    return call | {"id": f"call{number:05d}"}


def _identity(call: dict[str, Any]) -> _Call:
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return str(call["id"]), str(name)


def _answered(waiting: list[_Call], message: dict[str, Any]) -> Any:
    """Return the id of the call that a result belongs to, and take it from those that wait."""
    given = message.get("tool_call_id")
    name = message.get("tool_name")
    same = [call for call in waiting if call[0] == given]
    if given is None:
        same = [call for call in waiting if call[1] == name] or waiting
    if not same:
        return given
    call = same[0]
    waiting.remove(call)
    return call[0]
