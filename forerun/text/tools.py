"""The tools of a request in the form of OpenAI's API, and the grammar of forced calls.

It needs no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forerun.sampling.response_format import form_of
from forerun.text import generic_tools
from forerun.text.added_tokens import ids_of, special_texts
from forerun.text.chat import renders_tools
from forerun.text.tool_calls import FENCE, FORMS, ToolForm, ToolStream, form_of_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TOOLS = 128
NO_PARSER = "none"  # the parser of a server that refuses tools
_NAME = r"[a-zA-Z0-9_.:/-]{1,128}"
# Objects are written as chat templates write them, so that a call has the same tokens when it comes
# back in a conversation.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANYTHING = r"(.|\n)*"
_quoted = json.dumps
# What would end a regular expression between slashes, unless it is escaped.
_SLASH = re.compile(r"\\[\s\S]|[/\n]")
_SLASHES = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


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
class ToolChoice:
    """Which tools an answer may or must call.

    Attributes:
        mode: "none", "auto" or "required".
        allowed: the tools that may be called; None for all of them.
        is_single: whether exactly one call is wanted.
    """

    mode: str
    allowed: tuple[Tool, ...] | None = None
    is_single: bool = False


@dataclass(frozen=True)
class Tools:
    """The tools of a request, and how its answer is read.

    Attributes:
        tools: all of them.
        callable_names: the names of those that may be called.
        form: how the model writes calls; None if no calls are read.
        max_calls: the most calls of an answer, or None for any number.
        shown: the texts of special tokens that are part of calls.
        grammar: a `response_format` that the answer follows, or None.
    """

    tools: Sequence[Tool] = ()
    callable_names: frozenset[str] = frozenset()
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
        return ToolStream(self.form, self.callable_names, self.max_calls)


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


def checked_choice(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Return the `tool_choice` of OpenAI's API.

    It is "none", "auto" (the default if there are tools), "required", the tool that {"type":
    "function", "function": {"name": ...}} names, or {"type": "allowed_tools", "allowed_tools":
    {"mode": "auto" or "required", "tools": [...]}} with a list of such tools. Raises ValueError for
    others.
    """
    if choice is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(choice, str) and choice in ("none", "auto", "required"):
        if choice == "required" and not tools:
            raise ValueError("tool_choice required needs tools")
        return ToolChoice(choice)
    by_name = {tool.name: tool for tool in tools}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        given = choice.get("allowed_tools")
        given = given if isinstance(given, dict) else choice  # flat in /v1/responses
        names = _listed_names(given.get("tools"))
        if given.get("mode") in ("auto", "required") and names and names <= by_name.keys():
            allowed = tuple(tool for tool in tools if tool.name in names)
            return ToolChoice(given["mode"], allowed)
        raise ValueError(
            "tool_choice allowed_tools must have a mode, auto or required, and a list of one or "
            "more of the tools"
        )
    named = by_name.get(_name_of(choice) or "")
    if named is not None:
        return ToolChoice("required", (named,), is_single=True)
    raise ValueError(
        'tool_choice must be none, auto, required, {"type": "function", "function": {"name": '
        'one of the tools}}, or {"type": "allowed_tools", ...}'
    )


def _name_of(given: Any) -> str | None:
    """Return the name in {"type": "function", "function": {"name": ...}} or its flat form."""
    if not isinstance(given, dict) or given.get("type") != "function":
        return None
    function = given.get("function", given)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _listed_names(given: Any) -> set[str]:
    """Return the names of a list of tools; none if one of them has no name."""
    if not isinstance(given, list | tuple):
        return set()
    names = [_name_of(tool) for tool in given]
    return set() if None in names else {name for name in names if name is not None}


def answer_form(
    response_format: Any, choice: ToolChoice, tools: Sequence[Tool]
) -> tuple[str, str] | None:
    """Return the form of an answer that need not call a tool, as `form_of` does.

    Return None if any text will do, and where no tool may be called or one must be.

    Raises:
        ValueError: `form_of` refuses the response format, or it is a grammar, which cannot be
            joined with that of calls.
    """
    form = form_of(response_format)
    if choice.mode != "auto" or not tools:
        return None
    if form is not None and form[0] == "grammar":
        raise ValueError(
            "a response_format of type grammar cannot be given beside tools, unless tool_choice is "
            "none or required"
        )
    return form


def tools_for(
    tools: Sequence[Tool],
    choice: ToolChoice,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    parallel: bool = True,
    parser: str | None = None,
    answer: tuple[str, str] | None = None,
) -> Tools:
    """Return how tools are used with a tokenizer.

    That is what its template gets, how answers are read, and the grammar of calls that must follow
    a schema.

    Args:
        tools: the tools of a request.
        choice: as `checked_choice` returns it.
        tokenizer: that of the model.
        parallel: whether an answer may have several calls.
        parser: one of `FORMS`; None for the one that the chat template shows; `NO_PARSER` to refuse
            tools.
        answer: the form of an answer that calls no tool, as `answer_form` returns it.

    Raises:
        ValueError: there is no tokenizer, or the chat template shows no known form.
    """
    if not tools:
        return NO_TOOLS
    if parser == NO_PARSER:
        raise ValueError("this server takes no tools (--tool-parser none)")
    if tokenizer is None:
        raise ValueError("tools need a tokenizer; give tokenizer=...")
    if choice.mode == "none":
        return Tools(tools)
    form = _form_for(tools, tokenizer, parser)
    callable_tools = tools if choice.allowed is None else choice.allowed
    is_single = not parallel or choice.is_single
    markers = (form.begin, form.close)
    special = special_texts(tokenizer, markers)
    tokens = {text: f"<[{id}]>" for text, id in ids_of(tokenizer, markers).items()}
    is_free = choice.mode == "auto" and choice.allowed is None and answer is None
    grammar = None
    if not is_free or any(tool.strict for tool in tools):
        calls = _CallGrammar(form, callable_tools, choice.mode == "required", is_single, tokens)
        grammar = {"type": "grammar", "grammar": calls.lark(answer)}
    names = frozenset(tool.name for tool in callable_tools)
    return Tools(tools, names, form, 1 if is_single else None, special, grammar)


def _form_for(
    tools: Sequence[Tool], tokenizer: PreTrainedTokenizerBase, parser: str | None
) -> ToolForm:
    """Return how the model writes calls. Raises ValueError if that is not known."""
    if not renders_tools(tokenizer):
        if parser is not None and FORMS[parser] is not generic_tools.FORM:
            raise ValueError(
                f"the chat template of this model takes no tools, so calls are not in the form "
                f"{parser!r}; only --tool-parser hermes fits"
            )
        return generic_tools.FORM
    if parser is not None:
        return FORMS[parser]
    template = tokenizer.get_chat_template(tools=[tool.given for tool in tools])
    form = form_of_template(template)
    if form is None:
        known = ", ".join(FORMS)
        raise ValueError(
            f"the chat template shows no known form of calls; --tool-parser may say which: {known}"
        )
    return form


def _answer_rule(kind: str, text: str) -> str:
    """Return the rule of an answer that follows a regular expression or a JSON schema."""
    if kind == "json_schema":
        return f"answer: %json {text}"
    between = _SLASH.sub(lambda part: _SLASHES.get(part[0], part[0]), text)
    return f"answer: ANSWER\nANSWER: /{between}/"


def _moved(schema: Any, place: str) -> Any:
    """Return a schema whose references to itself hold where it stands in a larger one."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


@dataclass(frozen=True)
class _CallGrammar:
    """A grammar of a whole answer in llguidance's Lark.

    Attributes:
        form: how the model writes calls.
        tools: the tools that may be called.
        is_forced: whether an answer must be calls.
        is_single: whether an answer has at most one call.
        tokens: Lark's names of the markers that are tokens. The grammar takes only the token for
            such a marker, because the tokenizer writes the marker as this token.
    """

    form: ToolForm
    tools: Sequence[Tool]
    is_forced: bool
    is_single: bool
    tokens: dict[str, str]

    def lark(self, answer: tuple[str, str] | None) -> str:
        """Return the grammar.

        `answer` is the form of an answer that calls no tool, as `form_of` returns it. With None,
        text beside calls is free.
        """
        form = self.form
        if form.is_bare and answer is not None and answer[0] == "json_schema":
            return self._one_object(answer[1])
        rules = _call_rules(form, self.tools, self.is_forced)
        marker = self.tokens.get(form.begin) or _quoted(form.begin)
        close = self.tokens.get(form.close) or _quoted(form.close)
        # Llama's templates take one call per answer.
        is_single = self.is_single or form.is_bare
        again = ""
        if form.is_bare:
            block = "call"
        elif form.between:
            items = "" if is_single else f'("{form.between} " call)* '
            block = f'"{form.open}" call {items}{close}'
        else:
            block = f'"\\n" call "\\n" {close}'
            again = "" if is_single else r'("\n" begin block)* "\n"?'
        rules.append(f"block: {block}")
        if self.is_forced or answer is not None:
            start = "block" if form.is_bare else f"begin block {again}"
            rules.append(f"begin: {marker}")
            if answer is None:
                return "\n".join([f"start: {start}", *rules])
            alternatives = ["start: called | answer", f"called: {start}", _answer_rule(*answer)]
            return "\n".join([*alternatives, *rules])
        text_rules, calls = _text_rules(form, marker, is_token=form.begin in self.tokens)
        start = " | ".join([*calls, "TEXT"]) if is_single else f"({' | '.join(calls)})* TEXT"
        return "\n".join([f"start: {start}", *rules, *text_rules])

    def _one_object(self, schema: str) -> str:
        """Return the grammar of a call or an answer that are both JSON objects without a marker.

        They are one schema, because they may begin alike, which rules of Lark do not allow.
        """
        answer = json.loads(schema)
        style = answer.pop("x-guidance") if isinstance(answer, dict) else {}
        choices: list[Any] = [_moved(answer, "#/anyOf/0")]
        for number, tool in enumerate(self.tools, 1):
            place = f"#/anyOf/{number}/properties/{self.form.key}"
            arguments = _moved(_arguments(tool, self.is_forced), place)
            names = ["name", self.form.key]
            properties = dict(zip(names, ({"const": tool.name}, arguments), strict=True))
            choices.append(
                {
                    "type": "object",
                    "properties": properties,
                    "required": names,
                    "additionalProperties": False,
                }
            )
        return f"start: %json {json.dumps({'x-guidance': style, 'anyOf': choices})}"


def _arguments(tool: Tool, is_forced: bool) -> dict[str, Any]:
    """Return the schema of a call's arguments: any object, unless the tool's own must be kept.

    A tool without parameters takes none.
    """
    schema: dict[str, Any] = {"type": "object"}
    if is_forced or tool.strict:
        schema |= tool.given["function"]["parameters"]
        if schema.keys() <= {"type", "properties"} and schema.get("properties") == {}:
            schema["additionalProperties"] = False
    return schema


def _call_rules(form: ToolForm, tools: Sequence[Tool], is_forced: bool) -> list[str]:
    """Return the rules of a call of one of these tools."""
    rules = []
    for number, tool in enumerate(tools):
        schema = {"x-guidance": _STYLE} | _arguments(tool, is_forced)
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
