"""Chat templates with tools, and a decoder that writes what a test wants.

The templates are shortened ones of three families.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from forerun.api import requests
from forerun.api.decoder import Decoder
from forerun.sampling.thoughts import NO_MARKS, AnswerMarks
from tests.support.toys import noisy_copy, tiny, tiny_tokenizer

NAMES = ("hermes", "llama3", "mistral")
TEMPLATES = {
    name: (Path(__file__).parent / f"templates/{name}.jinja").read_text().rstrip() for name in NAMES
}
# Markers that are tokens in Qwen's, Llama's and Mistral's tokenizers, and whether they are special.
MARKERS = {
    "hermes": [("<tool_call>", False), ("</tool_call>", False)],
    "llama3": [("<|python_tag|>", True)],
    "mistral": [("[TOOL_CALLS]", True)],
}
END = 0


@cache
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny("llama", vocab=304, context=1024)
    target.generation_config.eos_token_id = END
    return target, noisy_copy(target, 0.02)


def make_decoder(
    name: str = "hermes",
    are_tokens: bool = True,
    pair: tuple[PreTrainedModel, PreTrainedModel] | None = None,
    **options: Any,
) -> Decoder:
    """A decoder with the template of a family, whose markers are tokens or spelled."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATES[name]
    if are_tokens:
        tokenizer.add_tokens(
            [AddedToken(text, special=special, normalized=False) for text, special in MARKERS[name]]
        )
    target, draft = pair or models()
    return Decoder(target, tokenizer, draft, guard=False, **options)


class _Script(LogitsProcessor):
    """Leaves one token: the next one of a text, then the end."""

    def __init__(self, start: int, tokens: list[int]) -> None:
        self.start, self.tokens = start, [*tokens, END]

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        at = min(input_ids.shape[1] - self.start, len(self.tokens) - 1)
        found = torch.full_like(scores, -torch.inf)
        found[:, self.tokens[at]] = 0
        return found


def scripted(say: Callable[[str], str | None]) -> Callable[..., Any]:
    """Stands in for `forerun.api.requests.requests`.

    Answers are what `say` returns for the text of the prompt; None leaves them to the model.
    """

    def make(
        rows: Any, params: Any, target: Any, tokenizer: Any, marks: AnswerMarks = NO_MARKS
    ) -> Any:
        lists = []
        for row in rows:
            text = say(tokenizer.decode(row))
            script = LogitsProcessorList()
            if text is not None:
                tokens = tokenizer.encode(text, add_special_tokens=False)
                script.append(_Script(len(row), tokens))
            lists.append(script)
        given = zip(rows, lists, strict=True)
        return [
            each
            for row, own in given
            for each in requests.requests([row], params, target, tokenizer, own, marks=marks)
        ]

    return make
