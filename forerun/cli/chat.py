"""`forerun chat`: one answer, or a conversation in the terminal, with a model here or at a server."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from forerun.cli import common
from forerun.cli.chosen import as_message, check_chat, chosen_method, read_prompt
from forerun.cli.common import hint, load_options, quiet, sampling_params
from forerun.cli.form import asked_form, check_extra, check_form
from forerun.cli.writing import Reading, as_object, show
from forerun.params import SamplingParams
from forerun.zoo import SMOLLM2

# Options for a model in this process, which a server has its own of.
LOCAL = (
    "target",
    "draft",
    "gamma",
    "method_arg",
    "pre_verifier",
    "head",
    "weights",
    "draft_weights",
    "draft_vocabulary",
    "draft_tokens",
    "device",
    "threads",
)


def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="One message to answer; '-' reads stdin. Nothing: a conversation.")
    ] = None,
    system: common.SystemOption = None,
    target: Annotated[
        str | None, typer.Option(help=f"Hub id, folder or GGUF file of a model with a chat template; else {SMOLLM2}.")
    ] = None,
    draft: common.DraftOption = None,
    method: common.MethodOption = None,
    gamma: common.GammaOption = None,
    method_arg: common.MethodArgOption = None,
    max_new_tokens: common.MaxNewTokensOption = 512,
    temperature: common.TemperatureOption = 0.0,
    top_k: common.TopKOption = 0,
    top_p: common.TopPOption = 1.0,
    min_p: common.MinPOption = 0.0,
    repetition_penalty: common.RepetitionPenaltyOption = 1.0,
    stop: common.StopOption = None,
    seed: common.SeedOption = None,
    json_schema: common.JsonSchemaOption = None,
    regex: common.RegexOption = None,
    grammar: common.GrammarOption = None,
    pre_verifier: common.PreVerifierOption = None,
    head: common.HeadOption = None,
    weights: common.WeightsOption = None,
    draft_weights: common.DraftWeightsOption = None,
    draft_vocabulary: common.DraftVocabularyOption = None,
    draft_tokens: common.DraftTokensOption = None,
    device: common.DeviceOption = None,
    threads: common.ThreadsOption = None,
    url: Annotated[
        str | None,
        typer.Option(help="Talk with a server instead: forerun's or another one with OpenAI's API. http://HOST:PORT."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --url: the model's name there, where it has several.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="With --url: what the server wants; else FORERUN_API_KEY, or for OpenAI OPENAI_API_KEY."),
    ] = None,
    as_json: common.JsonOption = False,
) -> None:
    """Talk with a model. With a prompt or text on stdin: one answer. Else a conversation; /help lists its commands.

    Colours of tokens are those of `forerun generate`."""
    response_format = asked_form(json_schema, regex, grammar)
    params = sampling_params(locals())
    talks = prompt is None and sys.stdin.isatty()
    if talks and as_json:
        raise ValueError("--json is for one answer: give a prompt")
    if url is not None:
        options = locals()
        given = [f"--{name.replace('_', '-')}" for name in LOCAL if options[name] is not None and options[name] != []]
        if given:
            raise ValueError(f"{', '.join(given)}: with --url the server has the model")
        messages = None if talks else as_message(read_prompt(prompt, None))
        _at_server(url, api_key, model, method, messages, params, system, as_json)
        return
    for name, value in (("model", model), ("api-key", api_key)):
        if value is not None:
            raise ValueError(f"--{name} is for --url")
    target = target if target is not None else SMOLLM2
    settings, is_named = chosen_method(target, draft, method, gamma, method_arg, pre_verifier, head)
    check_extra(response_format)
    options = load_options(locals())
    messages = as_message("Hello" if talks else read_prompt(prompt, None))  # any, to see that the template works
    quiet(threads)
    tokenizer = check_chat(target, messages, system)
    check_form(response_format, tokenizer)
    from forerun.api import load

    advice = hint(target, weights, None, device) if sys.stderr.isatty() else None
    if advice is not None:
        print(advice, file=sys.stderr)

    def make(chosen: Any) -> Any:
        return load(target, method=chosen, tokenizer=tokenizer, **options)

    decoder = make(settings if is_named else None)
    if talks:
        from forerun.cli.local import Local
        from forerun.cli.talk import Talk

        Talk(Local(decoder, make), params, system).run()
        return
    reading = decoder.progress = Reading()
    if as_json:
        result = decoder.chat(messages, params, system=system)
        reading.erase()
        print(json.dumps(as_object(result, decoder.method_for(greedy=not temperature).name)))
        return
    show(decoder.stream_chat(messages, params, system=system), reading)


def _at_server(
    url: str,
    key: str | None,
    model: str | None,
    method: str | None,
    messages: list[dict[str, str]] | None,
    params: SamplingParams,
    system: str | None,
    as_json: bool,
) -> None:
    """A conversation with a server; one answer where there are messages."""
    from forerun.chat import checked, with_system
    from forerun.cli.remote import Remote, collect
    from forerun.cli.talk import Talk

    with_system(checked(messages or as_message("Hello")), system)
    remote = Remote(url, key, model)
    if method is not None:
        remote.switch(method)
    remote.check_form(params.response_format)  # type: ignore[arg-type]
    if messages is None:
        Talk(remote, params, system).run()
        return
    chunks = remote.ask(messages, params, system, Reading())
    if not as_json:
        show(chunks, Reading())
        return
    found, trouble = collect(remote, chunks)
    print(json.dumps(found))
    if trouble is not None:
        raise trouble
