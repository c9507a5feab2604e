"""Tool calls in a model's text: the forms in which models write them, read as they come. Needs no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolForm:
    """How a family of models writes calls: each is a JSON object with a name and arguments.

    Attributes:
        begin: the marker before calls.
        open, between, close: what stands before the first call, between two, and after the last one.
        key: its name for the arguments; "arguments" and "parameters" are read in all forms.
        is_bare: a call of a known function may begin an answer without the marker.
        is_fenced: a call of a known function may be a block of JSON in Markdown, as Qwen2.5-Coder writes them.
        id: what the ids of calls begin with, and their length.
    """

    begin: str
    open: str = ""
    between: str = ""
    close: str = ""
    key: str = "arguments"
    is_bare: bool = False
    is_fenced: bool = False
    id: tuple[str, int] = ("call_", 29)


FORMS = {
    "hermes": ToolForm("<tool_call>", close="</tool_call>", is_fenced=True),
    "llama3": ToolForm("<|python_tag|>", between=";", key="parameters", is_bare=True),
    "mistral": ToolForm("[TOOL_CALLS]", "[", ",", "]", id=("", 9)),  # its templates refuse other ids
}

# Words of chat templates that show which form their models write, and words of forms that are no JSON.
_SIGNS = {
    "hermes": ["<tool_call>"],
    "mistral": ["[TOOL_CALLS]"],
    "llama3": ["<|python_tag|>", '"parameters": dictionary of argument name'],
}
_OTHERS = ("<function=", "<arg_key>", "[ARGS]")

FENCE = ("```json", "```")
_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"


def form_of_template(template: str) -> ToolForm | None:
    """Return the form that a chat template shows, if any."""
    shown = [name for name, signs in _SIGNS.items() if any(sign in template for sign in signs)]
    return FORMS[shown[0]] if shown and not any(other in template for other in _OTHERS) else None


@dataclass(frozen=True)
class ToolCall:
    """A call: the function's name, and its arguments as the JSON object that the model wrote."""

    name: str
    arguments: str


@dataclass(frozen=True)
class CallPiece:
    """A piece of a call in a stream: the first one has the name, all have a piece of the arguments."""

    index: int
    name: str | None
    arguments: str


def _header(key: str) -> list[str]:
    """Return what stands before the members of a call's arguments: expressions for one character each, or for many."""
    space, name = r"\s*", r'([^"\\]*)'
    before, after = ["{", space, *'"name"', space, ":", space, '"'], ['"', space, ",", space, *f'"{key}"', space, ":"]
    atoms = [*before, name, *after, space, "{"]
    return [atom if atom in (space, name) else re.escape(atom) for atom in atoms]


def _beginnings(atoms: list[str]) -> str:
    """Return an expression for every beginning of what the atoms describe."""
    return f"(?:{atoms[0]}{_beginnings(atoms[1:])})?" if atoms else ""


_HEADER = re.compile("|".join("".join(_header(key)) for key in _KEYS))
_BEGINNINGS = re.compile("|".join(_beginnings(_header(key)) for key in _KEYS))


class _Depth:
    """The depth of JSON that is read from a `{` on."""

    def __init__(self) -> None:
        self.depth, self._quoted, self._escaped = 0, False, False

    def until(self, least: int, text: str, at: int) -> int:
        """Read a text from a place on, up to where its depth falls to `least`. Return the place after that, or -1."""
        for place in range(at, len(text)):
            char = text[place]
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth <= least:
                    return place + 1
        return -1


class ToolStream:
    """Separates one answer's text, which comes in pieces, into text and calls.

    How the text was cut into pieces changes nothing. A call's name is given as soon as its arguments begin, and these
    as they come. What is no call stays text: `text` has all of a call that turned out to be broken, although its
    beginning may have been given. Whitespace around calls is dropped, as chat templates write their own.

    Attributes:
        calls: those that are complete.
        begun, broken: how many were begun to be given, and how many could not be read.
    """

    def __init__(self, form: ToolForm, names: Collection[str], most: int | None = None) -> None:
        """`names`: of the functions; `most`: how many calls are given; those after them are left out."""
        self.form, self.calls, self.begun, self.broken = form, list[ToolCall](), 0, 0
        self._names, self._most, self._index = names, most, -1  # the index of the present call, if it is given
        self._rest, self._before = "", ""  # text that is not read, and what was read and stands before an object
        self._said, self._given, self._finished = list[str](), list[str | CallPiece](), False
        self._reading = self._read()

    @property
    def text(self) -> str:
        """All text beside the complete calls."""
        return "".join(self._said)

    def push(self, text: str, finished: bool) -> list[str | CallPiece]:
        """Return texts and pieces of calls that are certain now; with `finished`, all that is left."""
        self._rest, self._given, self._finished = self._rest + text, [], finished
        next(self._reading, None)
        return self._given

    # Each `yield` waits for more text.

    def _read(self) -> Iterator[None]:
        if self.form.is_bare:
            at = yield from self._match(["{"])
            if at >= 0:
                yield from self._objects(at - 1, True, "")
        markers = {self.form.begin: self.form.close} | dict([FENCE] if self.form.is_fenced else [])
        beginnings = [marker[:n] for marker in markers for n in range(len(marker))]
        while True:
            rest = self._rest
            places = [(rest.find(each), each) for each in markers if each in rest]
            if places:
                at, marker = min(places)
                start = len(rest[:at].rstrip(_SPACE))
                self._say(start)
                self._skip(at - start + len(marker))
                is_bare = marker == FENCE[0]
                at = yield from self._match(["" if is_bare else self.form.open, "{"])
                if at >= 0:
                    yield from self._objects(at - 1, is_bare, markers[marker])
                else:
                    self.broken += not is_bare
                    self._say(0)
            elif self._finished:
                return self._say(len(rest.rstrip(_SPACE) if self.calls else rest))
            else:
                part = max(map(len, filter(rest.endswith, beginnings)))
                self._say(len(rest[: len(rest) - part].rstrip(_SPACE)))
                yield

    def _objects(self, at: int, is_bare: bool, close: str) -> Generator[None, None, None]:
        """Read the object after that much of the rest, those that follow it, and what stands after them."""
        while at >= 0:
            self._skip(at)
            if not (yield from self._object(is_bare)):
                return
            at = (yield from self._match([self.form.between, "{"])) - 1 if self.form.between else -1
        at = yield from self._match([close])
        self._rest = self._rest[max(at, 0) :]

    def _object(self, is_bare: bool) -> Generator[None, None, bool]:
        """Read an object; return whether it is a call. Without a marker it must name a function."""
        while not (head := _HEADER.match(self._rest)) and not self._finished and _BEGINNINGS.fullmatch(self._rest):
            yield
        name, begin, depth = head and (head[1] or head[2] or ""), head.end() - 1 if head else 0, _Depth()
        if is_bare and name not in self._names:
            self._say(1)
            return False
        if name is not None:
            self._give(name, "")
        end = yield from self._end(depth, begin, name is not None)
        upto = end if end >= 0 else len(self._rest)
        call = _call(name, self._rest[begin:upto])
        if end < 0 or call is None:
            self.broken += 1
            self._say(upto)
            return False
        if name is None:
            self._give(call.name, call.arguments)
        self.calls += [call] if self._index >= 0 else []
        self._rest, self._before, self._index = self._rest[end:], "", -1
        if name is not None:  # the end of the object, which models forget to write
            at = yield from self._match(["}"])
            if (yield from self._match([","])) >= 0:
                depth.depth = 1
                at = yield from self._end(depth, 0, False)
            self._rest = self._rest[max(at, 0) :]
        return True

    def _end(self, depth: _Depth, at: int, given: bool) -> Generator[None, None, int]:
        """Return where the JSON from a place on ends, or -1 if the text does. It may be given as arguments."""
        while True:
            end = depth.until(0, self._rest, at)
            upto = end if end >= 0 else len(self._rest)
            if given:
                self._give(None, self._rest[at:upto])
            if end >= 0 or self._finished:
                return end
            at = upto
            yield

    def _match(self, literals: list[str]) -> Generator[None, None, int]:
        """Return where literals end, which may have whitespace before them, or -1 if they do not stand there."""
        at = 0
        for literal in filter(None, literals):
            while not (rest := self._rest[at:].lstrip(_SPACE)).startswith(literal):
                if self._finished or not literal.startswith(rest):
                    return -1
                yield
            at = len(self._rest) - len(rest) + len(literal)
        return at

    def _skip(self, length: int) -> None:
        self._before, self._rest = self._before + self._rest[:length], self._rest[length:]

    def _say(self, length: int) -> None:
        """Take that much of the rest as text, after what stands before it. A stream may have given it as a call."""
        self._skip(length)
        if self._before:
            self._said.append(self._before)
            self._given += [self._before] if self._index < 0 else []
        self._before, self._index = "", -1

    def _give(self, name: str | None, arguments: str) -> None:
        """Give a piece of a call, unless there are enough calls."""
        if name is not None and (self._most is None or self.begun < self._most):
            self._index, self.begun = self.begun, self.begun + 1
        if self._index >= 0 and (name is not None or arguments):
            self._given.append(CallPiece(self._index, name, arguments))


def _call(name: str | None, text: str) -> ToolCall | None:
    """Return the call of a name with its arguments, or, without a name, of an object with both; None if it is none."""
    found = json_object(text)
    if name is None and found is not None:
        name, found = found.get("name"), next((found[key] for key in _KEYS if key in found), {})
        text = json.dumps(found, ensure_ascii=False)
    return ToolCall(name, text) if isinstance(name, str) and isinstance(found, dict) else None


def json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object of a text, or None if that is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
