"""`forerun generate` and `forerun chat`: a streamed answer, or a conversation in the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.common import quiet, say
from forerun.cli.options import (
    DecodeOptions,
    JsonOption,
    MaxNewTokensOption,
    SamplingOptions,
    TargetOption,
    grouped,
)
from forerun.cli.writing import Answer, Reading, say_default, say_loading, tinted
from forerun.files import read_text
from forerun.methods import Method
from forerun.sampling.params import SamplingParams
from forerun.zoo import EMBEDDED, best_fetched

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forerun.api.decoder import Decoder

SHOWN_CHARACTERS = 2000  # of the end of a prompt, on a terminal
FileOption = Annotated[Path | None, typer.Option(help="Read the prompt from this file.")]


@dataclass(frozen=True)
class ChatOptions:
    """The model of a conversation, and its system prompt."""

    system: Annotated[
        str | None,
        typer.Option(help="System prompt. Default: the one in the chat template, if any."),
    ] = None
    target: TargetOption = None
    max_new_tokens: MaxNewTokensOption = 512


@dataclass(frozen=True)
class Query:
    """What is asked: a text to continue, or messages, the last of which is to be answered."""

    prompt: str | list[dict[str, str]]
    params: SamplingParams
    system: str | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the answer is decoded greedily."""
        return not self.params.temperature

    def options(self, reading: Reading) -> dict[str, Any]:
        """Return the options of the decoder's methods; `reading` shows the progress."""
        options: dict[str, Any] = {"progress": reading}
        if not isinstance(self.prompt, str):
            options["system"] = self.system
        return options


@grouped
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt. Without it, or with '-', it is read from stdin."),
    ] = None,
    file: FileOption = None,
    target: TargetOption = None,
    max_new_tokens: MaxNewTokensOption = 256,
    *,
    sampling: SamplingOptions,
    decoding: DecodeOptions,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt.

    On a terminal the colour of a token tells where it comes from: green is drafted, cyan looked up,
    magenta from a phrase, yellow reused, and red corrected. The prompt is dim.
    """
    params = sampling.params(max_new_tokens)
    model = target or best_fetched()
    method = decoding.chosen_method(model)
    query = Query(_read_prompt(prompt, file), params)
    decoder = _loaded(model, query, decoding, method)
    if target is None:
        say_default(model)
    _answer(decoder, query, as_json)


@grouped
def chat(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help=(
                "One message to answer; '-' reads it from stdin. Without it a conversation begins."
            )
        ),
    ] = None,
    file: FileOption = None,
    *,
    chatting: ChatOptions,
    sampling: SamplingOptions,
    decoding: DecodeOptions,
    as_json: JsonOption = False,
) -> None:
    """Talk with a model.

    A prompt, or text on stdin, gets one answer. Without them a conversation begins, in which /help
    lists the commands. The colours of tokens are those of `forerun generate`.
    """
    params = sampling.params(chatting.max_new_tokens)
    is_conversation = prompt is None and file is None and sys.stdin.isatty()
    if is_conversation and as_json:
        raise ValueError("--json is for one answer: give a prompt")
    model = chatting.target or best_fetched()
    method = decoding.chosen_method(model)
    # For a conversation any message will do: it shows whether the template can be rendered.
    text = "Hello" if is_conversation else _read_prompt(prompt, file)
    query = Query(_messages(text), params, chatting.system)
    decoder = _loaded(model, query, decoding, method)
    if chatting.target is None:
        say_default(model)
    if is_conversation:
        from forerun.cli.talk import Talk

        Talk(decoder, params, chatting.system).run()
    else:
        _answer(decoder, query, as_json)


def _answer(decoder: Decoder, query: Query, as_json: bool) -> None:
    """Print the answer to a query, as JSON or as text that streams."""
    if as_json:
        _print_json(decoder, query)
    else:
        _stream(decoder, query)


def _print_json(decoder: Decoder, query: Query) -> None:
    """Print the whole answer as one JSON object."""
    reading = Reading()
    answered: Callable[..., Any] = (
        decoder.generate if isinstance(query.prompt, str) else decoder.chat
    )
    completion = answered(query.prompt, query.params, **query.options(reading))
    reading.erase()
    names = ("text", "tokens", "origins", "finish_reason")
    facts = {name: getattr(completion, name) for name in names}
    facts["method"] = decoder.method_for(greedy=query.is_greedy).name
    facts["stats"] = completion.stats.as_dict()
    print(json.dumps(facts))


def _stream(decoder: Decoder, query: Query) -> None:
    """Print the answer while it is decoded; on a terminal also the prompt and the figures."""
    from rich.console import Console

    reading = Reading()
    answer = Answer()
    console = Console(highlight=False, soft_wrap=True)
    options = query.options(reading)
    try:
        if isinstance(query.prompt, str):
            chunks = decoder.stream(query.prompt, query.params, **options)
            if console.is_terminal:
                end_of_prompt = query.prompt[-SHOWN_CHARACTERS:]
                console.print(tinted([(end_of_prompt, "prompt")]), end="")
        else:
            chunks = decoder.stream_chat(query.prompt, query.params, **options)
        answer.write(chunks, console, reading)
        print(flush=True)
    except ValueError:
        if answer.text:
            print(flush=True)
        raise
    if console.is_terminal:
        line = answer.figures(decoder.method_for(greedy=query.is_greedy).name)
        Console(stderr=True, highlight=False, soft_wrap=True).print(line, style="dim")


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the prompt of an argument, a file, or stdin.

    stdin is read for "-", and without prompt and file unless stdin is a terminal. Raises ValueError
    if there is no prompt, or if there are two.
    """
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


def _messages(text: str) -> list[dict[str, str]]:
    """Return a text as a conversation of one message.

    Files and pipes end with a newline, which is not part of the message.
    """
    return [{"role": "user", "content": text.removesuffix("\n").removesuffix("\r")}]


def _loaded(target: str, query: Query, decoding: DecodeOptions, method: Method | None) -> Decoder:
    """Return the decoder for a query.

    Raises ValueError, before weights are loaded, for a template that cannot render the messages, a
    prompt that does not fit the context, and a form of the output that cannot be used.
    """
    say_loading(target, decoding.draft)
    quiet(decoding.threads)
    from forerun.api.loading import load_config, load_tokenizer
    from forerun.api.requests import encode
    from forerun.model.causal_lm import context_of
    from forerun.text.chat import chat_prompt, has_template

    trust = decoding.trust_remote_code
    tokenizer = load_tokenizer(target, trust_remote_code=trust)
    prompt: Any = query.prompt
    if not isinstance(prompt, str):
        if target == EMBEDDED and not has_template(tokenizer):
            raise ValueError(
                "the embedded model has no chat template; `forerun fetch qwen-coder` (1.1 GB) or "
                "`forerun fetch smollm2` (98 MB) gets one that has a template"
            )
        prompt = chat_prompt(tokenizer, prompt, query.system)
    elif sys.stderr.isatty() and has_template(tokenizer):
        say("this model has a chat template; `forerun chat` uses it")
    config = load_config(target, "target", trust_remote_code=trust)
    encode(prompt, tokenizer, context_of(config), config.vocab_size)
    _check_form(query.params, tokenizer)
    from forerun.api.load import load

    return load(target, method=method, tokenizer=tokenizer, **decoding.for_load())


def _check_form(params: SamplingParams, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if the output cannot have the form that it must have.

    Only decoding can tell if the tokenizer names no end token, because the model may name one.
    """
    from forerun.sampling.grammar import compiled, end_of
    from forerun.sampling.response_format import form_of
    from forerun.text.chat import turn_ends

    form = form_of(params.response_format)
    ends = turn_ends(tokenizer) | end_of(tokenizer)
    if form is not None and ends:
        compiled(form, tokenizer, ends)
