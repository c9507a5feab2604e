"""`forerun generate` and `forerun chat`: one answer, streamed, or a conversation in the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.common import quiet, say
from forerun.cli.writing import Answer, Reading, say_loading, tinted
from forerun.files import read_text
from forerun.sampling.params import SamplingParams
from forerun.zoo import EMBEDDED, SMOLLM2

ECHOED = 2000  # characters of a prompt that a terminal shows, the last ones
FileOption = Annotated[Path | None, typer.Option(help="Read the prompt from this file.")]


@options.grouped
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; '-' or nothing reads stdin.")
    ] = None,
    file: FileOption = None,
    target: options.TargetOption = EMBEDDED,
    max_new_tokens: options.MaxNewTokensOption = 256,
    *,
    sampling: options.SamplingOptions,
    decoding: options.DecodeOptions,
    as_json: options.JsonOption = False,
) -> None:
    """Generate from a prompt. On a terminal: green is drafted, cyan looked up, magenta a phrase, yellow reused, red
    corrected, and the prompt is dim."""
    params = sampling.params(max_new_tokens)
    method = decoding.chosen_method(target)
    text = _read_prompt(prompt, file)
    _answer(_loaded(target, text, params, None, decoding, method), text, params, {}, as_json)


@options.grouped
def chat(
    prompt: Annotated[
        str | None,
        typer.Argument(help="One message to answer; '-' reads stdin. Nothing: a conversation."),
    ] = None,
    file: FileOption = None,
    system: Annotated[
        str | None, typer.Option(help="The system prompt; the chat template's own by default.")
    ] = None,
    target: Annotated[
        str, typer.Option(help="Hub id, folder or GGUF file of a model with a chat template.")
    ] = SMOLLM2,
    max_new_tokens: options.MaxNewTokensOption = 512,
    *,
    sampling: options.SamplingOptions,
    decoding: options.DecodeOptions,
    as_json: options.JsonOption = False,
) -> None:
    """Talk with a model. With a prompt or text on stdin: one answer. Else a conversation; /help lists its commands.

    Colours of tokens are those of `forerun generate`."""
    params = sampling.params(max_new_tokens)
    talks = prompt is None and file is None and sys.stdin.isatty()
    if talks and as_json:
        raise ValueError("--json is for one answer: give a prompt")
    method = decoding.chosen_method(target)
    messages = _message(
        "Hello" if talks else _read_prompt(prompt, file)
    )  # any, to see that the template works
    decoder = _loaded(target, messages, params, system, decoding, method)
    if talks:
        from forerun.cli.talk import Talk

        Talk(decoder, params, system).run()
    else:
        _answer(decoder, messages, params, {"system": system}, as_json)


def _answer(
    decoder: Any, prompt: Any, params: SamplingParams, chat: dict[str, Any], as_json: bool
) -> None:
    from rich.console import Console

    reading, is_chat = Reading(), isinstance(prompt, list)
    how: dict[str, Any] = {"progress": reading} | chat
    if as_json:
        result = (decoder.chat if is_chat else decoder.generate)(prompt, params, **how)
        reading.erase()
        found = {
            name: vars(result)[name] for name in ("text", "tokens", "origins", "finish_reason")
        }
        method = decoder.method_for(greedy=not params.temperature).name
        print(json.dumps(found | {"method": method, "stats": result.stats.as_dict()}))
        return
    answer, console = Answer(), Console(highlight=False, soft_wrap=True)
    try:
        chunks = (decoder.stream_chat if is_chat else decoder.stream)(prompt, params, **how)
        if console.is_terminal and not is_chat:
            console.print(tinted([(prompt[-ECHOED:], "prompt")]), end="")
        answer.write(chunks, console, reading)
        print(flush=True)
        if console.is_terminal:
            line = answer.figures(decoder.method_for(greedy=not params.temperature).name)
            Console(stderr=True, highlight=False, soft_wrap=True).print(line, style="dim")
    except ValueError:
        if answer.text:
            print(flush=True)
        raise


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """Read the prompt of an argument, a file, or stdin ("-", or nothing if stdin is not a terminal)."""
    if prompt not in (None, "-") and file is not None:
        raise ValueError("give a prompt or --file, not both")
    if file is None and prompt is None and sys.stdin.isatty():
        raise ValueError("no prompt: give one as an argument, with --file, or on stdin")
    if file is not None:
        prompt = read_text(file)
    elif prompt is None or prompt == "-":
        prompt = sys.stdin.read()
    if not prompt:
        raise ValueError("the prompt is empty")
    return prompt


def _message(text: str) -> list[dict[str, str]]:
    """Return a prompt as a conversation. The last line end, which files and pipes have, is no part of a message."""
    return [{"role": "user", "content": text.removesuffix("\n").removesuffix("\r")}]


def _loaded(
    target: str,
    prompt: Any,
    params: SamplingParams,
    system: str | None,
    decoding: options.DecodeOptions,
    method: Any,
) -> Any:
    """Return the decoder for a prompt.

    Raises ValueError, before weights are loaded, for a template that cannot render the messages, a prompt that does not
    fit the context, and a form that cannot be used.
    """
    say_loading(target, decoding.draft)
    quiet(decoding.threads)
    from forerun.api.loading import load_config, load_tokenizer
    from forerun.api.requests import encode
    from forerun.model.causal_lm import context_of
    from forerun.sampling.grammar import compiled, end_of
    from forerun.sampling.response_format import form_of
    from forerun.text.chat import chat_prompt, has_template, turn_ends

    tokenizer = load_tokenizer(target, trust_remote_code=decoding.trust_remote_code)
    if isinstance(prompt, list):
        if target == EMBEDDED and not has_template(tokenizer):
            raise ValueError(
                "the embedded model has no chat template; `forerun fetch smollm2` gets one that has"
            )
        prompt = chat_prompt(tokenizer, prompt, system)
    elif sys.stderr.isatty() and has_template(tokenizer):
        say("this model has a chat template, which `forerun chat` uses")
    config = load_config(target, "target", trust_remote_code=decoding.trust_remote_code)
    encode(prompt, tokenizer, context_of(config), config.vocab_size)
    form, ends = form_of(params.response_format), turn_ends(tokenizer) | end_of(tokenizer)
    if form is not None and ends:  # else the model may name an end token
        compiled(form, tokenizer, ends)
    from forerun.api.load import load

    return load(target, method=method, tokenizer=tokenizer, **decoding.for_load())
