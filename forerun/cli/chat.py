"""`forerun chat`: one answer, or a conversation in the terminal."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from forerun.cli.chosen import as_message, check_chat, chosen_method, read_prompt
from forerun.cli.common import (
    DeviceOption,
    DraftOption,
    DraftWeightsOption,
    GammaOption,
    HeadOption,
    MaxNewTokensOption,
    MethodArgOption,
    MethodOption,
    MinPOption,
    PreVerifierOption,
    RepetitionPenaltyOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    WeightsOption,
    hint,
    quiet,
    sampling_params,
)
from forerun.cli.writing import Answer, Reading, as_object
from forerun.zoo import SMOLLM2


def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="One message to answer; '-' reads stdin. Nothing: a conversation.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system prompt; the chat template's own by default.")] = None,
    target: Annotated[str, typer.Option(help="Hub id, folder or GGUF file of a model with a chat template.")] = SMOLLM2,
    draft: DraftOption = None,
    method: MethodOption = None,
    gamma: GammaOption = None,
    method_arg: MethodArgOption = None,
    max_new_tokens: MaxNewTokensOption = 512,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition_penalty: RepetitionPenaltyOption = 1.0,
    stop: StopOption = None,
    seed: SeedOption = None,
    pre_verifier: PreVerifierOption = None,
    head: HeadOption = None,
    weights: WeightsOption = None,
    draft_weights: DraftWeightsOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for one answer, nothing else.")
    ] = False,
) -> None:
    """Talk with a model. With a prompt or text on stdin: one answer. Else a conversation; /help lists its commands.

    Colours of tokens are those of `forerun generate`."""
    params = sampling_params(locals())
    settings, is_named = chosen_method(target, draft, method, gamma, method_arg, pre_verifier, head)
    talks = prompt is None and sys.stdin.isatty()
    if talks and as_json:
        raise ValueError("--json is for one answer: give a prompt")
    messages = as_message("Hello" if talks else read_prompt(prompt, None))  # any, to see that the template works
    quiet(threads)
    tokenizer = check_chat(target, messages, system)
    from rich.console import Console

    from forerun.api import load

    advice = hint(target, weights, None, device) if sys.stderr.isatty() else None
    if advice is not None:
        print(advice, file=sys.stderr)

    def make(chosen: Any) -> Any:
        return load(
            target,
            draft=draft,
            method=chosen,
            tokenizer=tokenizer,
            weights=weights,
            draft_weights=draft_weights,
            device=device,
            pre_verifier=pre_verifier,
            head=head,
        )

    decoder = make(settings if is_named else None)
    if talks:
        from forerun.cli.talk import Talk

        Talk(decoder, params, system, make).run()
        return
    reading = decoder.progress = Reading()
    if as_json:
        result = decoder.chat(messages, params, system=system)
        reading.erase()
        print(json.dumps(as_object(result, decoder.method_for(greedy=not temperature).name)))
        return
    chunks = decoder.stream_chat(messages, params, system=system)
    Answer().write(chunks, Console(highlight=False, soft_wrap=True), reading)
    print()
