"""Whom a conversation is with: a server with OpenAI's API, forerun's own or another one. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeGuard
from urllib.parse import urlsplit

from forerun.chat import checked, with_system
from forerun.cli.wire import BrokenError, Wire, plain
from forerun.cli.writing import Answer, Figures, Reading
from forerun.params import SamplingParams

OWN_KEY, OPENAI_KEY = "FORERUN_API_KEY", "OPENAI_API_KEY"
SHOWN = 10  # models in an error

# Sent where they are not what they are without being sent. OpenAI's own API has only the first two.
_OPTIONAL = ("top_p", "seed", "top_k", "min_p", "repetition_penalty", "response_format")


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer, as `forerun.decoder.Chunk`; `step` is what forerun's server tells of it."""

    text: str
    pieces: list[tuple[str, str]]
    step: dict[str, Any] | None
    finish_reason: str | None


def key_for(url: str) -> str | None:
    """The key that the environment has for a server. OpenAI's goes to OpenAI alone."""
    if own := os.environ.get(OWN_KEY):
        return own
    parts = urlsplit(url)
    is_openai = parts.scheme == "https" and (parts.hostname or "").endswith((".openai.com", ".openai.azure.com"))
    return os.environ.get(OPENAI_KEY) or None if is_openai else None


class Remote:
    """A model behind an address.

    Attributes:
        model: its name there.
        is_forerun: the server is forerun's, which tells where each token came from and can decode without drafts.
        context: the most tokens of a conversation, where the server says so.
        told: what the last answer came with: `usage`, `metrics`, `timings`.
    """

    def __init__(self, url: str, key: str | None = None, model: str | None = None) -> None:
        """Asks the server for its models. Raises ValueError where there is none, or several and no name."""
        self._wire = Wire(url, key if key is not None else key_for(url))
        models = _models(self._wire.get("models"), self._wire.url)
        if model is None and len(models) != 1:
            names = [plain(name) for name in list(models)[:SHOWN]] + ["..."] * (len(models) > SHOWN)
            has = f"has several models: {', '.join(names)}" if models else "names no models, as OpenAI's API would"
            raise ValueError(f"{self._wire.url} {has}; give --model")
        self.model = model if model is not None else next(iter(models))
        self.is_forerun = any(each.get("owned_by") == "forerun" for each in models.values())
        context = models.get(self.model, {}).get("max_model_len")
        self.context = context if _is_count(context) else None
        self.told: dict[str, Any] = {}
        self._plain = False

    def method(self, params: SamplingParams) -> str:
        return plain(self.model) + (" without drafts" if self._plain else "")

    def name(self, params: SamplingParams) -> str:
        return f"{self.method(params)} at {self._wire.url}"

    def ask(
        self, messages: Sequence[dict[str, str]], params: SamplingParams, system: str | None, reading: Reading
    ) -> Iterator[Chunk]:
        """An answer's chunks; closing them ends the answer at the server.

        Raises ValueError for messages that are none, BrokenError where the answer ends before its end.
        """
        found = with_system(checked(messages), system)
        self.check_form(dict(params.response_format) if params.response_format else None)
        return self._chunks(self._body(found, params))

    def _chunks(self, body: dict[str, Any]) -> Iterator[Chunk]:
        self.told, ended = {}, False
        with closing(self._wire.events("chat/completions", body)) as events:  # type: ignore[type-var]
            try:
                for event in events:
                    self.told |= {
                        key: event[key] for key in ("usage", "metrics", "timings") if _is_dict(event.get(key))
                    }
                    chunk = _chunk(event)
                    ended |= chunk.finish_reason is not None
                    if chunk.text or chunk.step or chunk.finish_reason:
                        yield chunk
            except BrokenError:
                if not ended:
                    raise

    def _body(self, messages: list[dict[str, str]], params: SamplingParams) -> dict[str, Any]:
        usual = SamplingParams()
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        values = {name: getattr(params, name) for name in _OPTIONAL if getattr(params, name) != getattr(usual, name)}
        if params.stop:
            values["stop"] = list(params.stop)
        if self.is_forerun:
            values |= {"forerun": True} | ({"forerun_method": "ar"} if self._plain else {})
        return body | values

    def figures(self, answer: Answer) -> Figures:
        """Of the last answer. The server counts its tokens; of one that was cut, its steps do."""
        steps = [step for step in answer.steps if step is not None]
        usage = self.told.get("usage", {})
        tokens, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
        if not _is_count(tokens):
            tokens = sum(step["accepted"] + 1 for step in steps) if steps else None
        context = prompt + tokens if _is_count(prompt) and tokens is not None else None
        return Figures(tokens, len(steps) or None, answer.seconds, context)

    def check_system(self, text: str | None) -> None:
        """Raises ValueError for a system prompt that is no text."""
        with_system([{"role": "user", "content": "Hello"}], text)

    def check_form(self, form: dict[str, Any] | None) -> None:
        """Raises ValueError for a form of the output that only forerun's server knows."""
        if form is not None and form["type"] in ("regex", "grammar") and not self.is_forerun:
            raise ValueError(f"--{form['type']} needs a forerun server: OpenAI's API has --json-schema alone")

    def switch(self, name: str) -> None:
        """To "ar", decoding without drafts, or back to what the server has. Raises ValueError for others."""
        if name not in ("ar", "server"):
            raise ValueError(f"with --url methods are ar, which is without drafts, and server, not {name!r}")
        if name == "ar" and not self.is_forerun:
            raise ValueError(f"{self._wire.url} is no forerun server: it has no method ar")
        self._plain = name == "ar"


def collect(remote: Remote, chunks: Iterator[Chunk]) -> tuple[dict[str, Any], BrokenError | None]:
    """An answer for --json, and what broke it off. A server does not tell the ids of its tokens.

    Raises BrokenError where nothing came.
    """
    pieces: list[tuple[str, str]] = []
    finish, trouble = None, None
    try:
        for chunk in chunks:
            pieces += chunk.pieces
            finish = chunk.finish_reason
    except BrokenError as error:
        if not pieces:
            raise
        trouble = error
    text = "".join(piece for piece, _ in pieces)
    found = {"text": text, "finish_reason": finish, "model": remote.model}
    return found | ({"pieces": pieces} if remote.is_forerun else {}) | remote.told, trouble


def _models(found: Any, url: str) -> dict[str, dict[str, Any]]:
    """The server's models by name; none where it has no such list."""
    if found is None:
        return {}
    data = found.get("data") if isinstance(found, dict) else None
    if not isinstance(data, list) or not all(_is_dict(each) and isinstance(each.get("id"), str) for each in data):
        raise ValueError(f"{url} is no server with OpenAI's API: it gives no list of models")
    return {each["id"]: each for each in data}


def _chunk(event: dict[str, Any]) -> Chunk:
    """What an event brings. Pieces that are not the text's are not believed."""
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and _is_dict(choices[0]) else {}
    delta = choice.get("delta")
    text = delta.get("content") if _is_dict(delta) else None
    text, finish = text if isinstance(text, str) else "", choice.get("finish_reason")
    pieces, step = [(text, "")] if text else [], _step(event.get("forerun"))
    if step is not None and "".join(piece for piece, _ in step["pieces"]) == text:
        pieces = [(piece, origin) for piece, origin in step["pieces"]]
    return Chunk(text, pieces, step, finish if isinstance(finish, str) else None)


def _step(told: Any) -> dict[str, Any] | None:
    """What forerun's server tells of a step; None where it is something else."""
    if not isinstance(told, dict) or not _is_count(told.get("accepted")) or not isinstance(told.get("pieces"), list):
        return None
    is_whole = all(isinstance(each, list) and list(map(type, each)) == [str, str] for each in told["pieces"])
    return told if is_whole else None


def _is_dict(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
