"""The thoughts that a model writes before its answer: their marks, and how they are read.

It needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from forerun.sampling.thoughts import Thoughts
from forerun.text.added_tokens import ids_of, special_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What begins and ends thoughts. A template names the marks of its model; the first are the default.
_MARKS = (
    ("<think>", "</think>"),  # DeepSeek, Qwen, GLM, SmolLM3
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<thought>", "</thought>"),  # EXAONE
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi
)
# Names by which templates switch thoughts on and off.
_SWITCHES = ("enable_thinking", "thinking")
_SPACE = " \t\r\n"
_TAIL = 16  # tokens at the end of a prompt, among which a mark is looked for


class ThoughtStream:
    """One answer, separated into thoughts and text while it comes in pieces.

    How the text was cut into pieces changes nothing. White space around thoughts is dropped.
    Thoughts stand at the beginning of an answer; a later mark is text.

    Attributes:
        marks: the marks.
        is_thinking: whether the next text may belong to thoughts.
        has_begun: whether thoughts have begun.
    """

    def __init__(self, thoughts: Thoughts) -> None:
        self.is_thinking = True
        self.marks = thoughts
        self.has_begun = thoughts.is_open
        self._is_first = True  # whether no character of the present part has come yet
        self._rest = ""

    def push(self, text: str, finished: bool) -> tuple[str, str]:
        """Return the thoughts and the text that are certain now; with `finished`, all."""
        self._rest += text
        if self.is_thinking and not self.has_begun:
            self._begin(finished)
        thoughts = self._think(finished) if self.is_thinking and self.has_begun else ""
        if self.is_thinking:
            return thoughts, ""
        return thoughts, self._take(len(self._rest), "")

    def _begin(self, finished: bool) -> None:
        """Look for the mark that begins thoughts. Without it all is text."""
        start = self._rest.lstrip(_SPACE)
        begin = self.marks.begin
        if start.startswith(begin):
            self._rest = start[len(begin) :]
            self.has_begun = True
        elif finished or not begin.startswith(start):
            self.is_thinking = False
            self._is_first = False  # white space before a text without thoughts stays

    def _think(self, finished: bool) -> str:
        """Return the thoughts that are certain."""
        close = self.marks.close
        end = self._rest.find(close)
        if end >= 0:
            thoughts = self._take(end, _SPACE)
            self._rest = self._rest.lstrip(_SPACE)[len(close) :]
            self.is_thinking = False
            self._is_first = True
            return thoughts
        if finished:
            return self._take(len(self._rest), _SPACE)
        held = max(size for size in range(len(close)) if self._rest.endswith(close[:size]))
        return self._take(len(self._rest) - held, _SPACE)

    def _take(self, length: int, trailing: str) -> str:
        """Take the first characters of the rest, without the white space at their end."""
        part = self._rest[:length].rstrip(trailing) if trailing else self._rest[:length]
        self._rest = self._rest[len(part) :]
        if self._is_first:
            part = part.lstrip(_SPACE)
            self._is_first = not part
        return part


def _named_marks(template: str) -> list[tuple[str, str]]:
    return [marks for marks in _MARKS if marks[0] in template or marks[1] in template]


def has_marks(template: str) -> bool:
    """Return whether a chat template names marks, as those of models that think do."""
    return bool(_named_marks(template))


def thinking_switch(template: str) -> str | None:
    """Return the name by which a chat template switches thoughts on and off, if it has one."""
    for name in _SWITCHES:
        if re.search(rf"\{{%[^%]*\b{name}\b", template):
            return name
    return None


def thinking_marks(tokenizer: PreTrainedTokenizerBase, template: str) -> Thoughts:
    """Return the thoughts that an answer may begin with, if its prompt says nothing of them.

    Args:
        tokenizer: that of the model.
        template: its chat template, which names the marks.
    """
    named = _named_marks(template)
    begin, close = named[0] if named else _MARKS[0]
    ids = ids_of(tokenizer, (begin, close))
    special = special_texts(tokenizer, (begin, close))
    return Thoughts(begin, close, False, ids.get(begin), ids.get(close), special)


def thoughts_after(
    marks: Thoughts, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], prefill: str | None
) -> Thoughts:
    """Return the thoughts that an answer to a prompt may begin with.

    Args:
        marks: as `thinking_marks` returns them.
        tokenizer: that of the model.
        prompt: the tokens of the prompt.
        prefill: the beginning of the answer, if the prompt has one.
    """
    tail = str(tokenizer.decode(list(prompt[-_TAIL:]), clean_up_tokenization_spaces=False))
    is_open = tail.rstrip(_SPACE).endswith(marks.begin)
    is_over = tail.rstrip(_SPACE).endswith(marks.close)
    if prefill:
        is_open = is_open or prefill.rfind(marks.begin) > prefill.rfind(marks.close)
        is_over = not is_open
    begin_token = None if is_over else marks.begin_token
    return replace(marks, is_open=is_open, begin_token=begin_token)
