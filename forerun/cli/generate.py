"""`forerun generate`: one prompt from an argument, a file or stdin, streamed."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from forerun.cli import common
from forerun.cli.chosen import as_message, check_chat, chosen_method, read_prompt
from forerun.cli.common import hint, load_options, quiet, sampling_params
from forerun.cli.form import asked_form, check_extra, check_form
from forerun.cli.writing import Reading, as_object, show
from forerun.zoo import EMBEDDED


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' or nothing reads stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message, rendered by the target's chat template.")
    ] = False,
    system: common.SystemOption = None,
    target: common.TargetOption = EMBEDDED,
    draft: common.DraftOption = None,
    method: common.MethodOption = None,
    gamma: common.GammaOption = None,
    method_arg: common.MethodArgOption = None,
    max_new_tokens: common.MaxNewTokensOption = 256,
    temperature: common.TemperatureOption = 0.0,
    top_k: common.TopKOption = 0,
    top_p: common.TopPOption = 1.0,
    min_p: common.MinPOption = 0.0,
    repetition_penalty: common.RepetitionPenaltyOption = 1.0,
    stop: common.StopOption = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the end token.")] = False,
    seed: common.SeedOption = None,
    json_schema: common.JsonSchemaOption = None,
    regex: common.RegexOption = None,
    grammar: common.GrammarOption = None,
    pre_verifier: common.PreVerifierOption = None,
    head: common.HeadOption = None,
    phrases: Annotated[
        Path | None, typer.Option(help="Keep phrases here: read if the file is there, written at the end.")
    ] = None,
    guard: common.GuardOption = None,
    dtype: common.DtypeOption = None,
    weights: common.WeightsOption = None,
    draft_weights: common.DraftWeightsOption = None,
    draft_vocabulary: common.DraftVocabularyOption = None,
    draft_tokens: common.DraftTokensOption = None,
    device: common.DeviceOption = None,
    device_map: Annotated[
        str | None, typer.Option(help="Instead of --device: auto, balanced, ..., as in transformers.")
    ] = None,
    tensor_parallel: Annotated[
        bool,
        typer.Option("--tensor-parallel", help="Split the target among the processes that torchrun started."),
    ] = False,
    threads: common.ThreadsOption = None,
    trust_remote_code: common.TrustOption = False,
    as_json: common.JsonOption = False,
    profile: Annotated[
        Path | None, typer.Option(help="Draw where the time of each step went, into this .png or .svg file.")
    ] = None,
) -> None:
    """Generate from a prompt. On a terminal: green is drafted, cyan looked up, magenta a phrase, yellow reused, red
    corrected."""
    response_format = asked_form(json_schema, regex, grammar)
    if response_format is not None and ignore_eos:
        raise ValueError("--ignore-eos cannot stand beside a form of the output, which says where it ends")
    params = sampling_params(locals())
    settings, is_named = chosen_method(target, draft, method, gamma, method_arg, pre_verifier, head)
    options = load_options(locals())
    if system is not None and not chat:
        raise ValueError("--system is for --chat")
    if phrases is not None:
        if settings.phrases is None or not is_named:
            raise ValueError("--phrases is for --method ouroboros, pacer-ouroboros, suffix and hybrid")
        if temperature and seed is None and settings.name not in ("suffix", "hybrid"):
            raise ValueError("--phrases is for greedy decoding: what is sampled must not depend on other runs")
        if not phrases.parent.is_dir():
            raise ValueError(f"--phrases takes a file in a folder that exists, not '{phrases}'")
    if profile is not None and (profile.suffix not in (".png", ".svg") or not profile.parent.is_dir()):
        raise ValueError(f"--profile takes a .png or .svg file in a folder that exists, not '{profile}'")
    check_extra(response_format)
    if tensor_parallel:
        if phrases is not None or profile is not None:
            raise ValueError(
                "--tensor-parallel cannot stand beside --phrases and --profile: those are files of one process"
            )
        if file is None and prompt in (None, "-"):
            raise ValueError("--tensor-parallel takes the prompt as an argument or from --file: stdin has one reader")
    text = read_prompt(prompt, file)
    quiet(threads)
    from forerun.api import load
    from forerun.bench.profile import plot_steps, profile_line
    from forerun.chat import has_template
    from forerun.loading import check_prompts

    advice = hint(target, weights, dtype, device) if device_map is None and sys.stderr.isatty() else None
    if advice is not None:
        print(advice, file=sys.stderr)
    if chat:
        tokenizer = check_chat(target, as_message(text), system, trust_remote_code=trust_remote_code)
    else:
        tokenizer = check_prompts(target, text, trust_remote_code=trust_remote_code)
        if sys.stderr.isatty() and has_template(tokenizer):
            print("forerun: this model has a chat template; --chat uses it", file=sys.stderr)
    check_form(response_format, tokenizer)
    with ExitStack() as stack:
        if tensor_parallel:
            from forerun.runtime.tensor_parallel import together

            stack.enter_context(together())
        decoder = load(
            target,
            method=settings if is_named else None,
            tokenizer=tokenizer,
            phrases=phrases if phrases is not None and phrases.exists() else None,
            **options,
        )
        reading = decoder.progress = Reading()
        if as_json:
            result = decoder.chat(as_message(text), params, system=system) if chat else decoder.generate(text, params)
            reading.erase()
            if phrases is not None:
                decoder.save_phrases(phrases)
            if profile is not None:
                plot_steps(result.steps, profile)
            print(json.dumps(as_object(result, decoder.method_for(greedy=not temperature).name)))
            return

        chunks = decoder.stream_chat(as_message(text), params, system=system) if chat else decoder.stream(text, params)
        answer = show(chunks, reading)
        if phrases is not None:
            decoder.save_phrases(phrases)
        if profile is not None:
            plot_steps(answer.steps, profile)
            print(profile_line(answer.steps), file=sys.stderr)
