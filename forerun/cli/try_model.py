"""`forerun try`: which method to use for a model on this machine."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.api.choose import resolve
from forerun.bench.plan import Plan
from forerun.bench.trial import PLAIN, Report, Subject, Verdict, run_trial, runnable
from forerun.bench.trial_prompts import EDIT, EDIT_TOKENS
from forerun.cli.common import quiet, say
from forerun.cli.options import JsonOption, LoadOptions, grouped
from forerun.cli.writing import say_loading
from forerun.methods import Method
from forerun.text.chat import has_template
from forerun.zoo import ModelSource, own_draft

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_SECONDS = 120
LEAST_SECONDS = 10
# Another method than the recommended one is named for a task if it is so much faster there.
TASK_GAIN = 1.1
NEARLY = 0.9  # of the long prompt: with less, a line says so


@grouped
def try_model(
    model: Annotated[
        str,
        typer.Argument(
            help="GGUF file, folder, hub id, or known name (smollm2, qwen-coder, embedded)."
        ),
    ],
    *,
    loading: LoadOptions,
    seconds: Annotated[
        float, typer.Option(min=LEAST_SECONDS, help="About how long it may take.")
    ] = DEFAULT_SECONDS,
    as_json: JsonOption = False,
) -> None:
    """Find out which method decodes a model fastest on this machine.

    Three built-in prompts (short code, prose, and the edit of a file of 2,000 tokens) are answered
    plainly and with each method that can run. A table shows how fast each was. The last lines say
    which method to use, and give the command for it.

    All answers are compared, token for token. The exit status is 1 if one differs from that of
    plain decoding.
    """
    ModelSource.parse(model, "target").check()
    draft = loading.draft if loading.draft is not None else own_draft(model)
    if draft is not None:
        ModelSource.parse(draft, "draft").check()
    say_loading(model, loading.draft)
    quiet(loading.threads)
    subject = _subject(model, draft, loading, seconds)
    with _progress(seconds, as_json) as report:
        verdict = run_trial(subject, report)
    command = _command(model, loading, verdict, subject.tokenizer)
    if as_json:
        print(json.dumps(verdict.as_dict() | {"command": command}))
    else:
        _show(verdict, command)
    if verdict.differences:
        raise typer.Exit(1)


def _subject(model: str, draft: str | None, loading: LoadOptions, seconds: float) -> Subject:
    """Return what is tried. Raises ValueError for a draft that does not fit."""
    import torch

    from forerun.server.memory import free_memory

    tokenizer = _tokenizer(model, loading.trust_remote_code)
    trust = loading.trust_remote_code
    methods = runnable(model, draft, tokenizer, trust_remote_code=trust)
    names = [option.name for option in fields(Plan) if option.name in vars(loading)]
    options: dict[str, Any] = {name: getattr(loading, name) for name in names}
    plan = Plan(**options | {"methods": methods, "target": model, "draft": draft, "guard": True})
    return Subject(plan, tokenizer, seconds, free_memory(torch.device("cpu")))


def _tokenizer(model: str, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """Return the model's tokenizer. A folder may lack one, for example that of a random model."""
    from forerun.api.loading import load_config, load_tokenizer

    load_config(model, "target", trust_remote_code=trust_remote_code)  # says what is broken
    try:
        return load_tokenizer(model, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if "no tokenizer files" not in str(error):
            raise
        say("the folder has no tokenizer, so bytes of the prompts stand for tokens")
        return None


@contextmanager
def _progress(seconds: float, is_quiet: bool) -> Iterator[Report]:
    """Yield what shows the progress: a bar on a terminal, and a line for each round elsewhere."""
    if is_quiet:
        yield lambda line: None
        return
    if not sys.stderr.isatty():
        yield _round_lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    # It is drawn when something begins, and not by a thread, because that would take time from
    # what is measured.
    columns = (TimeElapsedColumn(), BarColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    started_at = perf_counter()
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=seconds)

        def report(line: str) -> None:
            done = min(perf_counter() - started_at, seconds)
            bar.update(task, completed=done, description=line, refresh=True)

        yield report


def _round_lines() -> Report:
    """Return what prints a line on stderr when another round begins."""
    said = set[str]()

    def report(line: str) -> None:
        stage = line.partition(":")[0]
        if stage not in said:
            said.add(stage)
            say(stage)

    return report


def _show(verdict: Verdict, command: str) -> None:
    """Print the table, which method to use, and the command."""
    from rich.console import Console
    from rich.table import Table

    tasks = list(verdict.prompt_tokens)
    table = Table(title="times as fast as plain decoding")
    table.add_column("method", no_wrap=True)
    for heading in (*tasks, "overall", "same words", "rounds"):
        table.add_column(heading, justify="right", no_wrap=True)
    speeds = [f"{verdict.plain_speeds[task]:.1f}" for task in tasks]
    table.add_row("plain, tokens/s", *speeds, "", "", str(len(verdict.rounds)))
    ranked = sorted(verdict.methods, key=lambda name: -verdict.overall[name])
    for name in ranked:
        if name != PLAIN:
            style = "bold" if name == verdict.best else None
            table.add_row(*_cells(verdict, name, tasks), style=style)
    console = Console(highlight=False)
    console.print(table)
    for line in advice(verdict):
        console.print(line, soft_wrap=True, markup=False)
    console.print(f"\n    {command}", style="bold", soft_wrap=True, markup=False)


def _cells(verdict: Verdict, name: str, tasks: list[str]) -> list[str]:
    """Return a method's row."""
    gains = verdict.gains[name]
    figures = [f"{gains[task]:.2f}" for task in tasks]
    is_equal = "no" if name in verdict.differences else "yes"
    rounds = str(verdict.rounds_of(name))
    return [name, *figures, f"{verdict.overall[name]:.2f}", is_equal, rounds]


def advice(verdict: Verdict) -> list[str]:
    """Return the sentences below the table, all of which follow from the answers."""
    best = verdict.best
    lines = []
    if len(verdict.methods) == 1:
        lines.append("Only plain decoding can run.")
    elif best == PLAIN:
        lines.append("Use plain decoding: no method is faster over all three prompts.")
    else:
        gain = verdict.overall[best]
        lines.append(f"Use {best}: {gain:.1f} times as fast as plain decoding, the same words.")
    for task in verdict.prompt_tokens:
        name = verdict.best_of(task)
        gain = verdict.gains[name][task]
        if gain > TASK_GAIN * verdict.gains[best][task]:
            lines.append(f"For {task} alone {name} is faster ({gain:.1f} times).")
    if verdict.prompt_tokens[EDIT.name] < NEARLY * EDIT_TOKENS:
        lines.append(
            f"The edit has {verdict.prompt_tokens[EDIT.name]} tokens instead of {EDIT_TOKENS:,}, "
            "because this model's context or speed leaves room for no more."
        )
    for name, (task, place) in verdict.differences.items():
        lines.append(f"{name} differs from plain decoding: token {place + 1} of {task}.")
    if verdict.differences:
        lines.append(_reason(verdict))
    return lines


def _reason(verdict: Verdict) -> str:
    """Return why answers may differ."""
    if verdict.exact == "rounding":
        return (
            "On this machine the model's forwards round differently for one token and for several, "
            "so nearly equal scores may change places."
        )
    return "Answers should never differ: please report it, with the output of `forerun doctor`."


def _command(
    model: str,
    loading: LoadOptions,
    verdict: Verdict,
    tokenizer: PreTrainedTokenizerBase | None,
) -> str:
    """Return the command that uses the recommended method."""
    words = ["forerun", "chat" if has_template(tokenizer) else "generate", "--target", model]
    method = verdict.methods[verdict.best]
    for option in fields(LoadOptions):
        value = getattr(loading, option.name)
        is_needed = option.name not in ("draft", "draft_weights", "draft_vocabulary")
        if value == option.default or not (is_needed or method.needs_draft):
            continue
        words.append(f"--{option.name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    words += method_options(model, loading.draft if method.needs_draft else None, method)
    return shlex.join(words)


def method_options(target: str, draft: str | None, method: Method) -> list[str]:
    """Return the options that make the command line take a method with its settings."""
    from forerun.api.options import ModelOptions

    if resolve(target, draft, models=ModelOptions()).method == method:
        return []
    words = ["--method", method.name]
    usual = resolve(target, draft, method.name).method
    for option in fields(method):
        value = getattr(method, option.name)
        if value != getattr(usual, option.name):
            words += ["--method-arg", f"{option.name}={value}"]
    return words
