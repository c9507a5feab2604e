"""Tool calls in a model's text: the forms in which models write them, read as they come. Needs no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
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
    "mistral": ToolForm(
        "[TOOL_CALLS]", "[", ",", "]", id=("", 9)
    ),  # its templates refuse other ids
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


class _MoreTextError(Exception):
    """What comes next decides."""


_DECODER = json.JSONDecoder()
_NAMED = '{"name":"'  # how a call without a marker begins, without spaces
_UNSURE = 12  # characters after an error in JSON that more text may mend, as in "nul"


class ToolStream:
    """Separates one answer's text, which comes in pieces, into text and calls, each of which comes whole.

    How the text was cut into pieces changes nothing. What is no call stays text. Whitespace around calls is dropped, as
    chat templates write their own.

    Attributes:
        text, calls: all that was given so far.
        broken: how many calls were begun and could not be read.
    """

    def __init__(self, form: ToolForm, names: Collection[str], most: int | None = None) -> None:
        """`names`: of the functions; `most`: how many calls are given; those after them are left out."""
        self.form, self.text, self.calls, self.broken = form, "", list[ToolCall](), 0
        self._names, self._most, self._is_bare = names, most, form.is_bare
        self._markers = {form.begin: form.close} | dict([FENCE] if form.is_fenced else [])
        self._rest, self._given, self._finished = "", list[str | ToolCall](), False

    def push(self, text: str, finished: bool) -> list[str | ToolCall]:
        """Return texts and calls that are certain now; with `finished`, all that is left."""
        self._rest, self._given, self._finished = self._rest + text, [], finished
        try:
            while self._rest:
                self._step()
        except _MoreTextError:
            pass
        return self._given

    def _step(self) -> None:
        """Take something of the rest. Raises _MoreTextError if that is not certain yet."""
        rest = self._rest
        if self._is_bare:
            self._read(0, True, "")
            self._is_bare = False
            return
        places = [(rest.find(each), each) for each in self._markers if each in rest]
        if places:
            at, marker = min(places)
            if before := len(rest[:at].rstrip(_SPACE)):
                self._say(before)
            else:
                self._read(at + len(marker), marker == FENCE[0], self._markers[marker])
        elif self._finished:
            self._say(len(rest.rstrip(_SPACE) if self.calls else rest))
            self._rest = ""
        else:
            beginnings = (marker[:n] for marker in self._markers for n in range(len(marker)))
            part = max(len(each) for each in beginnings if rest.endswith(each))
            self._say(len(rest[: len(rest) - part].rstrip(_SPACE)))
            raise _MoreTextError

    def _read(self, at: int, is_bare: bool, close: str) -> None:
        """Take the calls after a marker, which ends at that place of the rest, with what closes them; or the marker as
        text, if there are none. Without a marker, or in a block of JSON, they must name a function."""
        found, end = list[ToolCall](), at
        place = self._after(at, "" if is_bare else self.form.open)
        while place >= 0:
            call, place = (
                (None, place) if is_bare and not self._names_function(place) else self._call(place)
            )
            if call is None:
                break
            found, end = [*found, call], place
            place = self._after(end, self.form.between) if self.form.between else -1
        is_broken = place >= 0 or not found
        self.broken += is_broken and not is_bare
        if not found:
            return self._say(at)
        self._rest = self._rest[max(end, self._after(end, close) if close else end) :]
        found = found[: None if self._most is None else max(0, self._most - len(self.calls))]
        self.calls += found
        self._given += found

    def _call(self, at: int) -> tuple[ToolCall | None, int]:
        """Return the call at a place and where it ends, or None and any place."""
        at = self._after(at, "")
        if not self._rest.startswith("{", at):
            return None, at
        try:
            found, end = _DECODER.raw_decode(self._rest, at)
        except json.JSONDecodeError as error:
            left = len(self._rest.rstrip(_SPACE)) - error.pos
            if not self._finished and (
                left < _UNSURE or error.msg.startswith("Unterminated string")
            ):
                raise _MoreTextError from None
            end = error.pos  # models forget the last brace
            found = json_object(self._rest[at:end] + "}") or {}
            found = found if any(key in found for key in _KEYS) else {}
        except (ValueError, RecursionError):  # a number of too many digits, or too many brackets
            return None, at
        name = found.get("name")
        arguments: Any = next((found[key] for key in _KEYS if key in found), {})
        is_call = isinstance(name, str) and isinstance(arguments, dict)
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False)) if is_call else None, end

    def _names_function(self, at: int) -> bool:
        flat = re.sub(r"\s", "", self._rest[at:])
        if not flat.startswith(_NAMED[: len(flat)]):
            return False
        name, quote, _ = flat[len(_NAMED) :].partition('"')
        if not quote and not self._finished:
            raise _MoreTextError
        return name in self._names

    def _after(self, at: int, literal: str) -> int:
        """Return where a literal ends that follows on a place, after whitespace, or -1 if another text does."""
        body = self._rest[at:].lstrip(_SPACE)
        if body.startswith(literal):
            if not body and not self._finished:
                raise _MoreTextError
            return len(self._rest) - len(body) + len(literal)
        if not self._finished and literal.startswith(body):
            raise _MoreTextError
        return -1

    def _say(self, length: int) -> None:
        if length:
            self.text += self._rest[:length]
            self._given.append(self._rest[:length])
            self._rest = self._rest[length:]


def json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object of a text, or None if that is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
