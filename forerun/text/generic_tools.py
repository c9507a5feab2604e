"""Tools for models whose chat template has none, written into the conversation. It needs no torch.

The form is that of Hermes, which many models have met in training and llama.cpp uses in this case
as well. The wording is ours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from forerun.text.tool_calls import FORMS

FORM = FORMS["hermes"]
_RESULT = ("<tool_response>\n", "\n</tool_response>")
_INTRODUCTION = """\
You can call functions. These are their names and JSON schemas:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as a JSON object between these tags:
{begin}
{{"name": <function name>, "arguments": <object of arguments>}}
{close}
The results are then given to you. Answer without a call where no function is needed."""


def with_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], takes_system: bool
) -> list[dict[str, Any]]:
    """Return a conversation that describes the tools in its system message.

    Args:
        messages: as `forerun.text.chat.checked` returns them.
        tools: functions in the form of OpenAI's API.
        takes_system: whether the template writes system messages. Otherwise the description stands
            before the first message.
    """
    lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    text = _INTRODUCTION.format(tools="\n".join(lines), begin=FORM.begin, close=FORM.close)
    first = messages[0]
    if first["role"] == "system" or not takes_system:
        return [first | {"content": f"{first['content']}\n\n{text}".strip()}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_calls_as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation whose calls are text of the assistant, and their results the user's.

    Results that follow each other, and what the user says after them, become one message, because
    many templates want the two roles in turns.
    """
    written: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        text = message["content"]
        role = "user" if is_result else message["role"]
        if is_result:
            text = text.join(_RESULT)
        parts = [text, *map(_call, message.get("tool_calls", ()))]
        text = "\n".join(part for part in parts if part)
        if after_result and role == "user":
            written[-1]["content"] += "\n" + text
        else:
            kept = {key: message[key] for key in message if key == "reasoning_content"}
            written.append({"role": role, "content": text, **kept})
        after_result = role == "user" and (is_result or after_result)
    return written


def _call(call: dict[str, Any]) -> str:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'{FORM.begin}\n{{"name": {name}, "arguments": {arguments}}}\n{FORM.close}'
