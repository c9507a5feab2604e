"""The tools of a request in the form of OpenAI's API, and the grammar of forced calls.

It needs no torch.
"""

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

MAX_TOOLS = 128
_NAME = r"[a-zA-Z0-9_.:/-]{1,128}"
# Objects are written as chat templates write them, so that a call has the same tokens when it comes
# back in a conversation.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANYTHING = r"(.|\n)*"
_quoted = json.dumps


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: the function's name.
        given: the tool as the chat template gets it.
        strict: whether its calls must follow the schema of its parameters.
    """

    name: str
    given: dict[str, Any]
    strict: bool


@dataclass(frozen=True)
class Tools:
    """The tools of a request, and how its answer is read.

    Attributes:
        tools: all of them.
        form: how the model writes calls; None if no calls are read.
        max_calls: the most calls of an answer, or None for any number.
        shown: the texts of special tokens that are part of calls.
        grammar: a `response_format` that the answer follows, or None.
    """

    tools: Sequence[Tool] = ()
    form: ToolForm | None = None
    max_calls: int | None = None
    shown: dict[int, str] = field(default_factory=dict)
    grammar: dict[str, str] | None = None

    @property
    def given(self) -> list[dict[str, Any]]:
        """The tools as the chat template gets them."""
        return [tool.given for tool in self.tools]

    def stream(self) -> ToolStream | None:
        """Return a reader of the answer's calls; None if no calls are read."""
        if self.form is None:
            return None
        return ToolStream(self.form, {tool.name for tool in self.tools}, self.max_calls)


NO_TOOLS = Tools()


def checked_tools(tools: Any) -> list[Tool]:
    """Return the tools of a request.

    Args:
        tools: a list of {"type": "function", "function": {name, description, parameters, strict}},
            as in OpenAI's API.

    Raises:
        ValueError: another form, a name that occurs twice, or parameters that are not the schema of
            an object.
    """
    if not isinstance(tools, list | tuple) or len(tools) > MAX_TOOLS:
        raise ValueError(f"tools must be a list of at most {MAX_TOOLS} functions")
    functions = [_tool(number, tool) for number, tool in enumerate(tools, 1)]
    names = [function.name for function in functions]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(f"two tools have the name {repeated[0]!r}")
    return functions


def _tool(number: int, tool: Any) -> Tool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise ValueError(
            f'tool {number} must be {{"type": "function", "function": {{...}}}}; '
            "there are no other types"
        )
    function = {key: value for key, value in function.items() if value is not None}
    name = function.get("name")
    strict = function.pop("strict", False)
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
        raise ValueError(f"tool {name!r} is not JSON") from None
    return Tool(name, {"type": "function", "function": function}, strict)


def checked_choice(choice: Any, tools: Sequence[Tool]) -> str | Tool:
    """Return the `tool_choice` of OpenAI's API.

    It is "none", "auto" (the default if there are tools), "required", or the tool that {"type":
    "function", "function": {"name": ...}} names. Raises ValueError for others.
    """
    if choice is None:
        return "auto" if tools else "none"
    if choice in ("none", "auto", "required"):
        if choice == "required" and not tools:
            raise ValueError("tool_choice required needs tools")
        return str(choice)
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        for tool in tools:
            if tool.name == name:
                return tool
    raise ValueError(
        'tool_choice must be none, auto, required, or {"type": "function", "function": {"name": '
        "one of the tools}}"
    )


def tools_for(
    tools: Sequence[Tool],
    choice: str | Tool,
    parallel: bool,
    tokenizer: PreTrainedTokenizerBase | None,
    parser: str | None = None,
) -> Tools:
    """Return how tools are used with a tokenizer.

    That is what its template gets, how answers are read, and the grammar of calls that must follow
    a schema.

    Args:
        tools: the tools of a request.
        choice: as `checked_choice` returns it.
        parallel: whether an answer may have several calls.
        tokenizer: that of the model.
        parser: one of `FORMS`; None for the one that the chat template shows.

    Raises:
        ValueError: the chat template takes no tools, or shows no known form.
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
    is_single = not parallel or isinstance(choice, Tool)
    added = {str(token): id for id, token in tokenizer.added_tokens_decoder.items()}
    markers = {added[text]: text for text in (form.begin, form.close) if text in added}
    decoder = tokenizer.added_tokens_decoder
    special = {id: text for id, text in markers.items() if decoder[id].special}
    tokens = {text: f"<[{id}]>" for id, text in markers.items()}
    lark = _grammar(form, tools, choice, is_single, tokens)
    grammar = None if lark is None else {"type": "grammar", "grammar": lark}
    return Tools(tools, form, 1 if is_single else None, special, grammar)


def _grammar(
    form: ToolForm,
    tools: Sequence[Tool],
    choice: str | Tool,
    is_single: bool,
    tokens: dict[str, str],
) -> str | None:
    """Return a grammar of a whole answer in llguidance's Lark; None if any text will do.

    Without a schema that must be followed nothing is restricted.

    Args:
        form: how the model writes calls.
        tools: the tools of a request.
        choice: as `checked_choice` returns it.
        is_single: whether an answer has at most one call.
        tokens: Lark's names of the markers that are tokens. The grammar takes only the token for
            such a marker, because the tokenizer writes the marker as this token.
    """
    is_forced = choice != "auto"
    if not is_forced and not any(tool.strict for tool in tools):
        return None
    rules = _call_rules(form, [choice] if isinstance(choice, Tool) else tools, is_forced)
    marker = tokens.get(form.begin) or _quoted(form.begin)
    close = tokens.get(form.close) or _quoted(form.close)
    again = ""
    if form.is_bare:  # Llama's templates take one call per answer
        is_single = True
        block = "call"
    elif form.between:
        items = "" if is_single else f'("{form.between} " call)* '
        block = f'"{form.open}" call {items}{close}'
    else:
        block = f'"\\n" call "\\n" {close}'
        again = "" if is_single else r'("\n" begin block)* "\n"?'
    rules.append(f"block: {block}")
    if is_forced:
        start = "block" if form.is_bare else f"begin block {again}"
        return "\n".join([f"start: {start}", f"begin: {marker}", *rules])
    text_rules, calls = _text_rules(form, marker, is_token=form.begin in tokens)
    start = " | ".join([*calls, "TEXT"]) if is_single else f"({' | '.join(calls)})* TEXT"
    return "\n".join([f"start: {start}", *rules, *text_rules])


def _call_rules(form: ToolForm, tools: Sequence[Tool], is_forced: bool) -> list[str]:
    """Return the rules of a call of one of these tools."""
    rules = []
    for number, tool in enumerate(tools):
        schema = {"x-guidance": _STYLE, "type": "object"}
        if is_forced or tool.strict:
            schema |= tool.given["function"]["parameters"]
        begin = _quoted(f': "{tool.name}", "{form.key}": ')
        rules.append(f'call{number}: {begin} args{number} "}}"')
        rules.append(f"args{number}: %json {json.dumps(schema)}")
    rules.append("named: " + " | ".join(f"call{number}" for number in range(len(tools))))
    rules.append(r'call: "{\"name\"" named')
    return rules


def _text_rules(form: ToolForm, marker: str, is_token: bool) -> tuple[list[str], list[str]]:
    """Return the rules of text between calls, and the alternatives of text with a call after it.

    Text does not contain the beginning of a call. In a bare form it does not begin with an object
    either, because that would be a call.
    """
    text = rf"\s*([^{{\s]{_ANYTHING})?" if form.is_bare else _ANYTHING
    sign = re.escape(form.begin)
    ends = [sign]
    calls = ["before block", "block"] if form.is_bare else ["before block"]
    rules = [f"before: TEXT {marker}" if is_token else f"before[lazy]: /{text}{sign}/"]
    if form.is_fenced:
        fence = rf'{FENCE[0]}\s*\{{\s*"name"'
        ends.append(fence)
        calls.append(f'fenced named "\\n{FENCE[1]}"')
        rules.append(f"fenced[lazy]: /{_ANYTHING}{fence}/")
    rules.append(f"TEXT: /{text}/ & ~/{_ANYTHING}({'|'.join(ends)}){_ANYTHING}/")
    return rules, calls
