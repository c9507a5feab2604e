"""`forerun bench`: methods beside each other on the same prompts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.bench.choose import NAMES, parse_methods
from forerun.bench.datasets import PUBLIC, STDLIB, read_files
from forerun.bench.plan import Plan, check_folder
from forerun.bench.sizes import SHAPES
from forerun.cli.common import (
    DeviceOption,
    DraftTokensOption,
    DraftVocabularyOption,
    DraftWeightsOption,
    DtypeOption,
    MaxNewTokensOption,
    TemperatureOption,
    ThreadsOption,
    TrustOption,
    WeightsOption,
    quiet,
)
from forerun.profiles import find, shipped
from forerun.zoo import EMBEDDED, own_draft


def bench(
    methods: Annotated[list[str] | None, typer.Option(help=f"{', '.join(NAMES)}; ar always runs.")] = None,
    dataset: Annotated[list[str] | None, typer.Option(help=f"{', '.join([*PUBLIC, *STDLIB])} or FILE.jsonl.")] = None,
    data: Annotated[Path | None, typer.Option(help="File of the public dataset, or the folder of several.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts of each dataset.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are messages, rendered by the target's chat template.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 2,
    max_new_tokens: MaxNewTokensOption = 128,
    out: Annotated[Path | None, typer.Option(help="Folder for records, results, report and pictures.")] = None,
    target: Annotated[str, typer.Option(help="Hub id, folder or GGUF file; the embedded one by default.")] = EMBEDDED,
    draft: Annotated[str | None, typer.Option(help="Hub id or folder of the draft.")] = None,
    method_arg: Annotated[list[str] | None, typer.Option(help="As in sd.gamma=6; repeatable.")] = None,
    tune: Annotated[str | None, typer.Option(help="Find the best value, as in sd.gamma=2,3,4.")] = None,
    temperature: TemperatureOption = 0.0,
    batch: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling: row i of round r uses seed + 1000 r + i.")] = 0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the standard library's prompts.")] = 128,
    top_p: Annotated[float, typer.Option(help="1 is all.")] = 1.0,
    head: Annotated[
        list[str] | None,
        typer.Option(help="Folder of a head of the target's, for lyanna or eagle; repeatable."),
    ] = None,
    pre_verifier: Annotated[
        list[str] | None, typer.Option(help="Folder of a trained layer, for pacer; repeatable.")
    ] = None,
    guard: Annotated[bool, typer.Option("--guard", help="Leave drafts out while they do not pay.")] = False,
    stop_at_eos: Annotated[bool, typer.Option("--stop-at-eos", help="End at the end token.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that --out holds.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Save pictures of where a step's time goes.")] = False,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    draft_weights: DraftWeightsOption = None,
    draft_vocabulary: DraftVocabularyOption = None,
    draft_tokens: DraftTokensOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    target_shape: Annotated[
        str | None, typer.Option(help=f"Measure the target in the size of another: {', '.join(SHAPES)}.")
    ] = None,
    draft_shape: Annotated[str | None, typer.Option(help="Likewise for the draft.")] = None,
    graphs: Annotated[bool, typer.Option("--graphs", help="Record forwards as CUDA graphs.")] = False,
    costs: Annotated[
        str | None,
        typer.Option(help="What methods that reckon go by, FILE.json or as h100:llama-2-7b:llama-68m; see simulate."),
    ] = None,
    clients: Annotated[
        list[str] | None, typer.Option(help="Measure under load: so many requests are always open, as in 1,4,16.")
    ] = None,
    rate: Annotated[
        list[str] | None, typer.Option(help="Measure under load: requests a second, Poisson arrivals, as in 2,4.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each load.")] = 64,
    new_tokens: Annotated[str, typer.Option(help="Least and most new tokens of a request of a load.")] = "16:256",
    logits: Annotated[
        bool,
        typer.Option("--check-logits", help="No times: compare verified logits with single steps', bit by bit."),
    ] = False,
    trust_remote_code: TrustOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, nothing else.")] = False,
) -> None:
    """Measure methods in turns on the same prompts, in one process. Lists may be given with commas.

    Settings that are not given are those that `forerun tune` found for the pair, where it did.
    """
    draft = draft if draft is not None else own_draft(target)
    ours = shipped(target, draft)
    tuned = ours.methods["sampling" if temperature else "greedy"] if ours is not None else {}
    chosen = parse_methods(_split(methods), method_arg or [], tune, tuned)
    plan = Plan(
        # "auto" is a draft's method here: which head is whose is known later.
        methods={name: each and each.resolve_defaults(draft is not None, False, None) for name, each in chosen.items()},
        datasets=tuple(_split(dataset)) or ("stdlib-test",),
        data=data,
        target=target,
        draft=draft,
        dtype=dtype,
        weights=weights,
        draft_weights=draft_weights,
        draft_vocabulary=draft_vocabulary,
        draft_tokens=draft_tokens,
        device=device,
        threads=threads,
        trust_remote_code=trust_remote_code,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        batch=batch,
        rounds=rounds,
        limit=limit,
        seed=seed,
        prompt_tokens=prompt_tokens,
        stop_at_eos=stop_at_eos,
        guard=guard,
        top_p=top_p,
        pre_verifier=tuple(pre_verifier or ()),
        head=tuple(head or ()),
        target_shape=target_shape,
        draft_shape=draft_shape,
        graphs=graphs,
        costs=costs,
        clients=_numbers("--clients", clients, int),
        rate=_numbers("--rate", rate, float),
        requests=requests,
        new_tokens=new_tokens,
        chat=chat,
        tune=tune,
    )
    if logits and (temperature or plan.loaded or resume or profile):
        raise ValueError("--check-logits is for greedy decoding, without --clients, --rate, --resume and --profile")
    if plan.loaded:
        plan = replace(plan, max_new_tokens=plan.lengths[1])
        if resume or profile:
            raise ValueError(f"--{'resume' if resume else 'profile'} is not for --clients and --rate")
    check_folder(out, resume)
    if profile and out is None:
        raise ValueError("--profile needs --out, the folder for its picture")
    files = read_files(plan.datasets, data, limit)
    quiet(threads)
    profile_of_pair = find(target, draft, device, dtype, weights, draft_weights)
    choice = profile_of_pair.choice(temperature) if profile_of_pair is not None else None
    if choice is not None:
        plan = replace(plan, methods=parse_methods(_split(methods), method_arg or [], tune, tuned | choice.tuned))
    from rich.console import Console

    from forerun.bench.pages import console_tables, load_tables, table_of
    from forerun.bench.serving import serve
    from forerun.bench.session import bench as run

    if logits:
        _check_logits(plan, files, out, as_json)
        return
    try:
        if plan.loaded:
            results = serve(plan, files, out, say=_progress)
        else:
            results = run(plan, files, out, resume=resume, profile=profile, say=_progress)
    except KeyboardInterrupt:
        if out is not None and not plan.loaded:
            print(f"forerun: what is measured stays in {out}: go on with --resume", file=sys.stderr)
        raise
    _progress("")
    if as_json:
        print(json.dumps(results))
        return
    console = Console(width=None if sys.stdout.isatty() else 140)
    tables = [table_of(*each) for each in load_tables(results)] if plan.loaded else console_tables(results)
    for table in tables:
        console.print(table)
    if "tuned" in results:
        console.print(f"best by median speedup: {json.dumps(results['tuned'])}")
    if out is not None:
        console.print(f"records, results, report and pictures are in {out}", soft_wrap=True)


def _check_logits(plan: Plan, files: dict[str, Any], out: Path | None, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from forerun.bench.logits import check_logits, save

    results = check_logits(plan, files, say=_progress)
    _progress("")
    if out is not None:
        save(results, out)
    if as_json:
        print(json.dumps(results))
        return
    target = results["target"]
    table = Table(title=f"verified logits beside single steps': {target['weights']}, exact: {target['exact']}")
    for column in ("method", "logits", "other bits", "largest difference", "outputs", "other outputs"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, each in results["check_logits"].items():
        largest = f"{each['largest']:.2g}"
        counts = each["logits"], each["differ"], largest, each["outputs"], each["outputs_differ"]
        table.add_row(name, *map(str, counts))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _split(values: list[str] | None) -> list[str]:
    return [part for value in values or [] for part in value.split(",") if part]


def _numbers(option: str, values: list[str] | None, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in _split(values))
    except ValueError as error:
        raise ValueError(f"{option} takes numbers: {error}") from None


def _progress(line: str) -> None:
    """Printed between measurements, not beside them."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
