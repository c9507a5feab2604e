"""The method that `generate` and `chat` decode with, and their prompts, checked before anything is loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from forerun.cli.common import parse_method
from forerun.files import read_text
from forerun.methods import Method, Pacer, default_method
from forerun.zoo import EMBEDDED, companion, own_draft, resolve


def chosen_method(
    target: str,
    draft: str | None,
    method: str | None,
    gamma: int | None,
    method_arg: list[str] | None,
    pre_verifier: Path | None,
    head: Path | None,
) -> tuple[Method, bool]:
    """The method of these options, and whether they name one; else `load` chooses.

    Raises ValueError for settings that are none, models that are not there, and a method that lacks its draft or head.
    """
    own = own_draft(target)
    layered = pre_verifier is not None or (draft in (None, own) and companion(target, Pacer.layer) is not None)
    given = [*["gamma"] * (gamma is not None), *(each.partition("=")[0] for each in method_arg or [])]
    unnamed = default_method(bool(draft or own), layered, given)
    settings = parse_method(method or unnamed, gamma, method_arg)
    if settings.needs_draft and not draft and own is None:
        raise ValueError(f"method {settings.name!r} needs a draft model: give --draft")
    if settings.head is not None and head is None and companion(target, settings.head) is None:
        raise ValueError(f"method {settings.name!r} needs a head: give --head, train one with `forerun train lyanna`")
    resolve(target, "target")
    if draft is not None:
        resolve(draft, "draft")
    return settings, method is not None or gamma is not None or bool(method_arg)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt of an argument, a file, or stdin ("-", or nothing where stdin is not a terminal)."""
    if prompt is not None and prompt != "-" and file is not None:
        raise ValueError("give a prompt or --file, not both")
    if file is not None:
        text = read_text(file)
    elif prompt is not None and prompt != "-":
        text = prompt
    elif prompt == "-" or not sys.stdin.isatty():
        text = sys.stdin.read()
    else:
        raise ValueError("no prompt: give one as an argument, with --file, or on stdin")
    if not text:
        raise ValueError("the prompt is empty")
    return text


def as_message(text: str) -> list[dict[str, str]]:
    """A prompt as a conversation. The last line end, which files and pipes have, is no part of a message."""
    return [{"role": "user", "content": text.removesuffix("\n").removesuffix("\r")}]


def check_chat(target: str, messages: Any, system: str | None, *, trust_remote_code: bool = False) -> Any:
    """The target's tokenizer. Raises ValueError where it cannot render the messages, or they fill the context; no
    weights are loaded for that."""
    from forerun.chat import chat_prompt, has_template
    from forerun.loading import encode, load_config, load_tokenizer
    from forerun.model import context_of

    tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
    if target == EMBEDDED and not has_template(tokenizer):
        raise ValueError("the embedded model has no chat template; `forerun fetch smollm2` gets one that has")
    ids = chat_prompt(tokenizer, messages, system)
    config = load_config(target, "target", trust_remote_code=trust_remote_code)
    encode(ids, tokenizer, context_of(config), config.vocab_size)
    return tokenizer
