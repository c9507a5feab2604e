"""`forerun generate`: one prompt from an argument, a file or stdin, streamed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.common import (
    METHOD_HELP,
    STYLES,
    DeviceOption,
    DraftWeightsOption,
    DtypeOption,
    GammaOption,
    GuardOption,
    MaxNewTokensOption,
    MethodArgOption,
    SeedOption,
    TemperatureOption,
    ThreadsOption,
    TrustOption,
    WeightsOption,
    hint,
    parse_method,
    quiet,
)
from forerun.files import read_text
from forerun.methods import default_method
from forerun.params import SamplingParams
from forerun.zoo import EMBEDDED, bundled_head, resolve


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


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' or nothing reads stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    target: Annotated[
        str, typer.Option(help="Hub id, folder or GGUF file of the target; the embedded one by default.")
    ] = EMBEDDED,
    draft: Annotated[str | None, typer.Option(help="Hub id or folder of the draft.")] = None,
    method: Annotated[str | None, typer.Option(help=METHOD_HELP)] = None,
    gamma: GammaOption = None,
    method_arg: MethodArgOption = None,
    max_new_tokens: MaxNewTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is all.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is all.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is none.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the end token.")] = False,
    seed: SeedOption = None,
    pre_verifier: Annotated[Path | None, typer.Option(help="Folder of the draft's trained layer.")] = None,
    head: Annotated[Path | None, typer.Option(help="Folder of the target's head, for lyanna, eagle, medusa.")] = None,
    phrases: Annotated[
        Path | None, typer.Option(help="Keep phrases here: read if the file is there, written at the end.")
    ] = None,
    guard: GuardOption = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    draft_weights: DraftWeightsOption = None,
    device: DeviceOption = None,
    device_map: Annotated[
        str | None, typer.Option(help="Instead of --device: auto, balanced, ..., as in transformers.")
    ] = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, nothing else.")] = False,
    profile: Annotated[
        Path | None, typer.Option(help="Draw where the time of each step went, into this .png or .svg file.")
    ] = None,
) -> None:
    """Generate from a prompt. On a terminal: green is drafted, cyan looked up, magenta a phrase, yellow reused, red
    corrected."""
    layered = pre_verifier is not None or (target == EMBEDDED and draft in (None, EMBEDDED))
    given = [*["gamma"] * (gamma is not None), *(each.partition("=")[0] for each in method_arg or [])]
    unnamed = default_method(bool(draft) or target == EMBEDDED, layered, given)
    settings = parse_method(method or unnamed, gamma, method_arg)
    is_named = method is not None or gamma is not None or bool(method_arg)
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop or [],
        ignore_eos=ignore_eos,
        seed=seed,
    )
    if settings.needs_draft and not draft and target != EMBEDDED:
        raise ValueError(f"method {settings.name!r} needs a draft model: give --draft")
    if settings.head is not None and head is None and bundled_head(target, settings.head) is None:
        raise ValueError(f"method {settings.name!r} needs a head: give --head, train one with `forerun train lyanna`")
    if phrases is not None:
        if settings.phrases is None or not is_named:
            raise ValueError("--phrases is for --method ouroboros, pacer-ouroboros and lookahead")
        if temperature:
            raise ValueError("--phrases is for greedy decoding: what is sampled must not depend on other runs")
        if not phrases.parent.is_dir():
            raise ValueError(f"--phrases takes a file in a folder that exists, not '{phrases}'")
    if profile is not None and (profile.suffix not in (".png", ".svg") or not profile.parent.is_dir()):
        raise ValueError(f"--profile takes a .png or .svg file in a folder that exists, not '{profile}'")
    resolve(target, "target")
    if draft is not None:
        resolve(draft, "draft")
    text = read_prompt(prompt, file)
    quiet(threads)
    from forerun.api import load
    from forerun.bench.profile import plot_steps, profile_line
    from forerun.loading import check_prompts

    advice = hint(target, weights, dtype, device) if device_map is None and sys.stderr.isatty() else None
    if advice is not None:
        print(advice, file=sys.stderr)
    tokenizer = check_prompts(target, text, trust_remote_code=trust_remote_code)
    decoder = load(
        target,
        draft=draft,
        method=settings if is_named else None,
        tokenizer=tokenizer,
        dtype=dtype,
        weights=weights,
        draft_weights=draft_weights,
        device=device,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        guard=guard,
        pre_verifier=pre_verifier,
        head=head,
        phrases=phrases if phrases is not None and phrases.exists() else None,
    )
    if as_json:
        result = decoder.generate(text, params)
        if phrases is not None:
            decoder.save_phrases(phrases)
        if profile is not None:
            plot_steps(result.steps, profile)
        print(
            json.dumps(
                {
                    "text": result.text,
                    "tokens": result.tokens,
                    "origins": result.origins,
                    "finish_reason": result.finish_reason,
                    "method": decoder.method_for(greedy=not temperature).name,
                    "stats": result.stats.as_dict(),
                }
            )
        )
        return

    from rich.console import Console
    from rich.text import Text

    console, steps = Console(highlight=False, soft_wrap=True), []
    for chunk in decoder.stream(text, params):
        steps.append(chunk.step)
        if console.is_terminal:
            for piece, origin in chunk.pieces:
                console.print(Text(piece, style=STYLES.get(origin, "")), end="")
        else:
            print(chunk.text, end="", flush=True)
    print()
    if phrases is not None:
        decoder.save_phrases(phrases)
    if profile is not None:
        plot_steps(steps, profile)
        print(profile_line(steps), file=sys.stderr)
