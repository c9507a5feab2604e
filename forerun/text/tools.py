"""The tools of a request, as OpenAI describes them: what is asked of the model, and the grammar of forced calls. Needs
no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forerun.text.chat import renders_tools
from forerun.text.tool_calls import FENCE, FORMS, ToolForm, ToolStream, form_of_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_TOOLS = 128
_NAME = r"[a-zA-Z0-9_.:/-]{1,128}"
# Between an object's members as chat templates write them: a call that comes back in a conversation has its own tokens.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANYTHING = r"(.|\n)*"
_quoted = json.dumps


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        given: the tool as the chat template gets it.
        strict: its calls follow the schema of its parameters.
    """

    name: str
    given: dict[str, Any]
    strict: bool


@dataclass(frozen=True)
class Tools:
    """The tools of a request, and how its answer is read.

    Attributes:
        tools: all of them.
        form: None where no calls are read.
        most: calls of an answer; None is any number.
        shown: texts of special tokens that are part of calls.
        grammar: a `response_format` that the answer follows, or None.
    """

    tools: Sequence[Tool] = ()
    form: ToolForm | None = None
    most: int | None = None
    shown: dict[int, str] = field(default_factory=dict)
    grammar: dict[str, str] | None = None

    @property
    def given(self) -> list[dict[str, Any]]:
        return [tool.given for tool in self.tools]

    def stream(self) -> ToolStream | None:
        """Return what reads an answer, if there is a form."""
        return (
            ToolStream(self.form, {tool.name for tool in self.tools}, self.most)
            if self.form is not None
            else None
        )


NO_TOOLS = Tools()


def checked_tools(tools: Any) -> list[Tool]:
    """Return tools given as OpenAI's list of {"type": "function", "function": {name, description, parameters, strict}}.
    Raises ValueError for another form, a name that comes twice, and parameters that are no schema of an object."""
    if not isinstance(tools, list | tuple) or len(tools) > MOST_TOOLS:
        raise ValueError(f"tools must be a list of at most {MOST_TOOLS} functions")
    found = [_tool(number, tool) for number, tool in enumerate(tools, 1)]
    names = [tool.name for tool in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two tools have the name {twice[0]!r}")
    return found


def _tool(number: int, tool: Any) -> Tool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise ValueError(
            f'tool {number} must be {{"type": "function", "function": {{...}}}}; there are no other types'
        )
    function = {key: value for key, value in function.items() if value is not None}
    name, strict = function.get("name"), function.pop("strict", False)
    if not isinstance(name, str) or not re.fullmatch(_NAME, name):
        raise ValueError(
            f"the name of tool {number} must be 1 to 128 ASCII letters, digits and _ . : / -"
        )
    if not isinstance(function.get("description", ""), str) or not isinstance(strict, bool):
        raise ValueError(
            f"tool {name!r} must have a text as description, and true or false as strict"
        )
    parameters = function.setdefault("parameters", {"type": "object", "properties": {}})
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ValueError(f"the parameters of tool {name!r} must be a JSON schema of an object")
    try:
        json.dumps(function, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"tool {name!r} is no JSON") from None
    return Tool(name, {"type": "function", "function": function}, strict)


def checked_choice(choice: Any, tools: Sequence[Tool]) -> str | Tool:
    """Return OpenAI's `tool_choice`: "none", "auto" (the default where there are tools), "required", or the tool that
    {"type": "function", "function": {"name": ...}} names. Raises ValueError for others."""
    if choice is None:
        return "auto" if tools else "none"
    if choice in ("none", "auto", "required"):
        if choice == "required" and not tools:
            raise ValueError("tool_choice required needs tools")
        return str(choice)
    function = (
        choice.get("function")
        if isinstance(choice, dict) and choice.get("type") == "function"
        else None
    )
    named = [
        tool for tool in tools if isinstance(function, dict) and tool.name == function.get("name")
    ]
    if not named:
        raise ValueError(
            'tool_choice must be none, auto, required, or {"type": "function", "function": {"name": one of the tools}}'
        )
    return named[0]


def tools_for(
    tools: Sequence[Tool],
    choice: str | Tool,
    parallel: bool,
    tokenizer: PreTrainedTokenizerBase | None,
    parser: str | None = None,
) -> Tools:
    """Return how tools are used with a tokenizer: what its template gets, how answers are read, and the grammar of
    calls that must follow a schema.

    Args:
        parallel: whether an answer may have several calls.
        parser: one of `FORMS`; None: the one that the chat template shows.

    Raises ValueError for a chat template that takes no tools, and one that shows no known form.
    """
    if not tools:
        return NO_TOOLS
    if tokenizer is None or not renders_tools(tokenizer):
        raise ValueError("the chat template of this model takes no tools")
    if choice == "none":
        return Tools(tools)
    template = tokenizer.get_chat_template(tools=[tool.given for tool in tools])
    form = FORMS[parser] if parser is not None else form_of_template(template)
    if form is None:
        known = ", ".join(FORMS)
        raise ValueError(
            f"the chat template shows no known form of calls; --tool-parser may say which: {known}"
        )
    added = {str(token): id for id, token in tokenizer.added_tokens_decoder.items()}
    markers = {added[text]: text for text in (form.begin, form.close) if text in added}
    special = {
        id: text for id, text in markers.items() if tokenizer.added_tokens_decoder[id].special
    }
    most = None if parallel and isinstance(choice, str) else 1
    lark = _grammar(form, tools, choice, most, {text: f"<[{id}]>" for id, text in markers.items()})
    grammar = None if lark is None else {"type": "grammar", "grammar": lark}
    return Tools(tools, form, most, special, grammar)


def _grammar(
    form: ToolForm,
    tools: Sequence[Tool],
    choice: str | Tool,
    most: int | None,
    tokens: dict[str, str],
) -> str | None:
    """Return a grammar in llguidance's Lark for a whole answer; None for any text.

    A marker that is a token, as `tokens` say, is that token: the tokenizer would write no other. Without a schema that
    must be followed nothing is restricted.
    """
    is_forced = choice != "auto"
    if not is_forced and not any(tool.strict for tool in tools):
        return None
    used = [choice] if isinstance(choice, Tool) else tools
    rules = []
    for number, tool in enumerate(used):
        schema = {"x-guidance": _STYLE, "type": "object"}
        schema |= tool.given["function"]["parameters"] if is_forced or tool.strict else {}
        begin = _quoted(f': "{tool.name}", "{form.key}": ')
        rules += [
            f'call{number}: {begin} args{number} "}}"',
            f"args{number}: %json {json.dumps(schema)}",
        ]
    rules.append("named: " + " | ".join(f"call{number}" for number in range(len(used))))
    rules.append(r'call: "{\"name\"" named')
    marker, close = (tokens.get(text) or _quoted(text) for text in (form.begin, form.close))
    if form.is_bare:  # Llama's templates take one call an answer
        block, again, most = "call", "", 1
    elif form.between:
        items = "" if most == 1 else f'("{form.between} " call)* '
        block, again = f'"{form.open}" call {items}{close}', ""
    else:
        block, again = f'"\\n" call "\\n" {close}', r'("\n" begin block)* "\n"?'
    rules.append(f"block: {block}")
    if is_forced:
        start = "block" if form.is_bare else f"begin block {'' if most == 1 else again}"
        return "\n".join([f"start: {start}", f"begin: {marker}", *rules])
    # Text has no beginning of a call in it, nor an object at its own beginning where that would be one.
    text, sign = rf"\s*([^{{\s]{_ANYTHING})?" if form.is_bare else _ANYTHING, re.escape(form.begin)
    ends, calls = [sign], ["before block", *(["block"] if form.is_bare else [])]
    rules.append(
        f"before: TEXT {marker}" if form.begin in tokens else f"before[lazy]: /{text}{sign}/"
    )
    if form.is_fenced:
        ends.append(rf'{FENCE[0]}\s*\{{\s*"name"')
        calls.append(f'fenced named "\\n{FENCE[1]}"')
        rules.append(f"fenced[lazy]: /{_ANYTHING}{ends[1]}/")
    rules.append(f"TEXT: /{text}/ & ~/{_ANYTHING}({'|'.join(ends)}){_ANYTHING}/")
    start = " | ".join([*calls, "TEXT"]) if most == 1 else f"({' | '.join(calls)})* TEXT"
    return "\n".join([f"start: {start}", *rules])
