"""`forerun generate` and `forerun chat`: one answer, streamed, or a conversation in the terminal."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli.common import quiet, say
from forerun.cli.form import check_form
from forerun.cli.options import (
    DecodeOptions,
    JsonOption,
    MaxNewTokensOption,
    SamplingOptions,
    SystemOption,
    TargetOption,
    grouped,
)
from forerun.cli.writing import Answer, Reading
from forerun.files import read_text
from forerun.sampling.params import SamplingParams
from forerun.zoo import EMBEDDED, SMOLLM2

LARGE = 100_000_000  # bytes of a target from which on fewer bits are recommended


@grouped
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' or nothing reads stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message, rendered by the target's chat template.")
    ] = False,
    system: SystemOption = None,
    target: TargetOption = EMBEDDED,
    max_new_tokens: MaxNewTokensOption = 256,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end token.")] = False,
    *,
    sampling: SamplingOptions,
    decoding: DecodeOptions,
    device_map: Annotated[
        str | None, typer.Option(help="Instead of --device: auto, balanced, ..., as in transformers.")
    ] = None,
    tensor_parallel: Annotated[
        bool, typer.Option("--tensor-parallel", help="Split the target among the processes that torchrun started.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Generate from a prompt. On a terminal: green is drafted, cyan looked up, magenta a phrase, yellow reused, red
    corrected."""
    params = sampling.params(max_new_tokens, ignore_eos)
    method = decoding.chosen_method(target)
    if system is not None and not chat:
        raise ValueError("--system is for --chat")
    if tensor_parallel and file is None and prompt in (None, "-"):
        raise ValueError("--tensor-parallel takes the prompt as an argument or from --file: stdin has one reader")
    text = _read_prompt(prompt, file)
    quiet(decoding.threads)
    from forerun.api.load import load
    from forerun.api.loading import check_prompts
    from forerun.text.chat import has_template

    if device_map is None:
        _advise(target, decoding)
    if chat:
        tokenizer = _chat_tokenizer(target, _message(text), system, decoding.trust_remote_code)
    else:
        tokenizer = check_prompts(target, text, trust_remote_code=decoding.trust_remote_code)
        if sys.stderr.isatty() and has_template(tokenizer):
            say("this model has a chat template; --chat uses it")
    check_form(params.response_format, tokenizer)
    with ExitStack() as stack:
        if tensor_parallel:
            from forerun.backends.tensor_parallel import together

            stack.enter_context(together())
        decoder = load(
            target,
            method=method,
            tokenizer=tokenizer,
            device_map=device_map,
            tensor_parallel=tensor_parallel,
            **decoding.for_load(),
        )
        _answer(decoder, _message(text) if chat else text, params, system, as_json)


@grouped
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="One message to answer; '-' reads stdin. Nothing: a conversation.")
    ] = None,
    system: SystemOption = None,
    target: Annotated[str, typer.Option(help="Hub id, folder or GGUF file of a model with a chat template.")] = SMOLLM2,
    max_new_tokens: MaxNewTokensOption = 512,
    *,
    sampling: SamplingOptions,
    decoding: DecodeOptions,
    as_json: JsonOption = False,
) -> None:
    """Talk with a model. With a prompt or text on stdin: one answer. Else a conversation; /help lists its commands.

    Colours of tokens are those of `forerun generate`."""
    params = sampling.params(max_new_tokens)
    talks = prompt is None and sys.stdin.isatty()
    if talks and as_json:
        raise ValueError("--json is for one answer: give a prompt")
    method = decoding.chosen_method(target)
    messages = _message("Hello" if talks else _read_prompt(prompt, None))  # any, to see that the template works
    quiet(decoding.threads)
    tokenizer = _chat_tokenizer(target, messages, system, decoding.trust_remote_code)
    check_form(params.response_format, tokenizer)
    from forerun.api.load import load

    _advise(target, decoding)

    def make(chosen: Any) -> Any:
        return load(target, method=chosen, tokenizer=tokenizer, **decoding.for_load())

    decoder = make(method)
    if talks:
        from forerun.cli.talk import Talk

        Talk(decoder, make, params, system).run()
    else:
        _answer(decoder, messages, params, system, as_json)


def _answer(decoder: Any, prompt: Any, params: SamplingParams, system: str | None, as_json: bool) -> list[Any]:
    """Print the answer to a prompt, which is text, or a conversation as a list; return its steps."""
    from rich.console import Console

    is_chat = isinstance(prompt, list)
    reading = Reading()
    how: dict[str, Any] = {"progress": reading} | ({"system": system} if is_chat else {})
    if as_json:
        result = (decoder.chat if is_chat else decoder.generate)(prompt, params, **how)
        reading.erase()
        found = {name: vars(result)[name] for name in ("text", "tokens", "origins", "finish_reason")}
        method = decoder.method_for(greedy=not params.temperature).name
        print(json.dumps(found | {"method": method, "stats": result.stats.as_dict()}))
        return list(result.steps)
    chunks = (decoder.stream_chat if is_chat else decoder.stream)(prompt, params, **how)
    answer = Answer()
    try:
        answer.write(chunks, Console(highlight=False, soft_wrap=True), reading)
    except ValueError:
        if answer.text:
            print(flush=True)
        raise
    print()
    return answer.steps


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """Read the prompt of an argument, a file, or stdin ("-", or nothing if stdin is not a terminal)."""
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


def _message(text: str) -> list[dict[str, str]]:
    """Return a prompt as a conversation. The last line end, which files and pipes have, is no part of a message."""
    return [{"role": "user", "content": text.removesuffix("\n").removesuffix("\r")}]


def _chat_tokenizer(target: str, messages: Any, system: str | None, trust_remote_code: bool) -> Any:
    """Load the target's tokenizer. Raises ValueError if it cannot render the messages, or if they fill the context; no
    weights are loaded for that."""
    from forerun.api.loading import encode, load_config, load_tokenizer
    from forerun.model.causal_lm import context_of
    from forerun.text.chat import chat_prompt, has_template

    tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
    if target == EMBEDDED and not has_template(tokenizer):
        raise ValueError("the embedded model has no chat template; `forerun fetch smollm2` gets one that has")
    ids = chat_prompt(tokenizer, messages, system)
    config = load_config(target, "target", trust_remote_code=trust_remote_code)
    encode(ids, tokenizer, context_of(config), config.vocab_size)
    return tokenizer


def _advise(target: str, decoding: DecodeOptions) -> None:
    """Recommend fewer bits on a terminal, before a large float target is loaded on a CPU."""
    import torch

    from forerun.backends.gguf import find
    from forerun.zoo import resolve

    if not sys.stderr.isatty() or decoding.weights is not None or decoding.dtype is not None:
        return
    folder = resolve(target, "target")
    device = decoding.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.partition(":")[0] != "cpu" or not isinstance(folder, Path) or find(folder):
        return
    if sum(path.stat().st_size for path in folder.glob("*.safetensors")) >= LARGE:
        say(
            "the target stays in float32; --weights int8 would read about a quarter of the bytes a token "
            "(docs/results/bits.md has what that costs in loss)"
        )
