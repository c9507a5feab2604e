"""Tool calls in a model's text: the forms of models, and how they are read. It needs no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolForm:
    """How a family of models writes calls, which are JSON objects with a name and arguments.

    Attributes:
        begin: the marker before calls.
        open: what is before the first call.
        between: what is between two calls.
        close: what is after the last call.
        key: the name of the arguments; "arguments" and "parameters" are read in all forms.
        is_bare: whether a call of a known function may begin an answer without the marker.
        is_fenced: whether a call of a known function may be a block of JSON in Markdown.
            Qwen2.5-Coder writes such blocks.
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
    # Mistral's templates refuse other ids.
    "mistral": ToolForm("[TOOL_CALLS]", "[", ",", "]", id=("", 9)),
}

# Words in chat templates that show which form the model writes, and words that show another form,
# which is not JSON.
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
    if any(other in template for other in _OTHERS):
        return None
    for name, signs in _SIGNS.items():
        if any(sign in template for sign in signs):
            return FORMS[name]
    return None


@dataclass(frozen=True)
class ToolCall:
    """A call of a function.

    Attributes:
        name: the function's name.
        arguments: the JSON object that the model wrote, as text.
    """

    name: str
    arguments: str


class _MoreTextError(Exception):
    """More text is needed to decide."""


_DECODER = json.JSONDecoder()
_NAMED = '{"name":"'  # how a call without a marker begins, without spaces
# If fewer characters than this follow an error in JSON, more text may still mend it. For example,
# "nul" may become "null".
_UNSURE = 12


class ToolStream:
    """One answer, separated into text and calls while its text comes in pieces.

    A call is returned when it is complete. How the text was cut into pieces changes nothing. What
    is not a call stays text. Whitespace around calls is dropped, because chat templates write their
    own.

    Attributes:
        form: how the model writes calls.
        text: all text so far.
        calls: all calls so far.
        broken: how many calls were begun and could not be read.
    """

    def __init__(
        self, form: ToolForm, names: Collection[str], max_calls: int | None = None
    ) -> None:
        """Begin an answer.

        Args:
            form: how the model writes calls.
            names: those of the functions.
            max_calls: how many calls are returned, or None for all. Further calls are dropped.
        """
        self.form = form
        self.text = ""
        self.calls: list[ToolCall] = []
        self.broken = 0
        self._names = names
        self._max_calls = max_calls
        self._is_bare = form.is_bare
        self._markers = {form.begin: form.close}
        if form.is_fenced:
            self._markers |= dict([FENCE])
        self._rest = ""
        self._given: list[str | ToolCall] = []
        self._finished = False

    def push(self, text: str, finished: bool) -> list[str | ToolCall]:
        """Return the texts and calls that are certain now; with `finished`, all that is left."""
        self._rest += text
        self._given = []
        self._finished = finished
        with suppress(_MoreTextError):
            while self._rest:
                self._step()
        return self._given

    def _step(self) -> None:
        """Take text or calls from the rest. Raises _MoreTextError if nothing is certain yet."""
        rest = self._rest
        if self._is_bare:
            self._read(0, True, "")
            self._is_bare = False
            return
        places = [(rest.find(marker), marker) for marker in self._markers if marker in rest]
        if places:
            at, marker = min(places)
            before = len(rest[:at].rstrip(_SPACE))
            if before:
                self._say(before)
            else:
                self._read(at + len(marker), marker == FENCE[0], self._markers[marker])
        elif self._finished:
            self._say(len(rest.rstrip(_SPACE) if self.calls else rest))
            self._rest = ""
        else:
            beginnings = (marker[:n] for marker in self._markers for n in range(len(marker)))
            part = max(len(beginning) for beginning in beginnings if rest.endswith(beginning))
            self._say(len(rest[: len(rest) - part].rstrip(_SPACE)))
            raise _MoreTextError

    def _read(self, at: int, is_bare: bool, close: str) -> None:
        """Take the calls after a marker and what closes them, or the marker as text without calls.

        Args:
            at: where the marker ends in the rest.
            is_bare: whether calls must name a known function, because there is no marker, or the
                marker only begins a block of JSON.
            close: what closes the calls.
        """
        calls: list[ToolCall] = []
        end = at
        place = self._after(at, "" if is_bare else self.form.open)
        while place >= 0:
            if is_bare and not self._names_function(place):
                break
            call, place = self._call(place)
            if call is None:
                break
            calls.append(call)
            end = place
            place = self._after(end, self.form.between) if self.form.between else -1
        is_broken = place >= 0 or not calls
        self.broken += is_broken and not is_bare
        if not calls:
            self._say(at)
            return
        self._rest = self._rest[max(end, self._after(end, close) if close else end) :]
        if self._max_calls is not None:
            calls = calls[: max(0, self._max_calls - len(self.calls))]
        self.calls += calls
        self._given += calls

    def _call(self, at: int) -> tuple[ToolCall | None, int]:
        """Return the call at a place and where it ends, or None and any place."""
        at = self._after(at, "")
        if not self._rest.startswith("{", at):
            return None, at
        try:
            written, end = _DECODER.raw_decode(self._rest, at)
        except json.JSONDecodeError as error:
            left = len(self._rest.rstrip(_SPACE)) - error.pos
            if not self._finished and (
                left < _UNSURE or error.msg.startswith("Unterminated string")
            ):
                raise _MoreTextError from None
            end = error.pos  # models forget the last brace
            written = json_object(self._rest[at:end] + "}") or {}
            if not any(key in written for key in _KEYS):
                written = {}
        except (
            ValueError,
            RecursionError,
        ):  # a number has too many digits, or the nesting is too deep
            return None, at
        name = written.get("name")
        arguments: Any = next((written[key] for key in _KEYS if key in written), {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None, end
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False)), end

    def _names_function(self, at: int) -> bool:
        """Return whether a call of a known function begins at a place."""
        flat = re.sub(r"\s", "", self._rest[at:])
        if not flat.startswith(_NAMED[: len(flat)]):
            return False
        name, quote, _ = flat[len(_NAMED) :].partition('"')
        if not quote and not self._finished:
            raise _MoreTextError
        return name in self._names

    def _after(self, at: int, literal: str) -> int:
        """Return where a literal ends that follows `at` and any whitespace; -1 for another text."""
        body = self._rest[at:].lstrip(_SPACE)
        if body.startswith(literal):
            if not body and not self._finished:
                raise _MoreTextError
            return len(self._rest) - len(body) + len(literal)
        if not self._finished and literal.startswith(body):
            raise _MoreTextError
        return -1

    def _say(self, length: int) -> None:
        """Give out the first characters of the rest as text."""
        if length:
            self.text += self._rest[:length]
            self._given.append(self._rest[:length])
            self._rest = self._rest[length:]


def json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object of a text, or None if the text is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
