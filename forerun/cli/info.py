"""`forerun info`: what is installed, which methods there are, and what the embedded pair is."""

from __future__ import annotations

import json
import platform
import sys
from collections import deque
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun import __version__
from forerun.cli import common
from forerun.cli.common import quiet
from forerun.methods import METHODS
from forerun.profiles import pair_of, stored
from forerun.zoo import EMBEDDED, FOLDER, own_draft, resolve

BATCHES, TOKENS = (4, 16), (1, 2, 4, 8)  # rows, and tokens of each
SLOW = 100.0  # ms of a forward from which on batches would take minutes


def collect() -> dict[str, Any]:
    """Everything that `info` shows."""
    import torch

    results = FOLDER / "results.json"
    return {
        "forerun": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "methods": {name: asdict(settings()) for name, settings in METHODS.items()},
        "embedded": json.loads(results.read_text()) if results.exists() else None,
        "weights_bytes": sum(path.stat().st_size for path in FOLDER.glob("*/*.safetensors")),
    }


def costs(target: str, draft: str | None, context: int | None, load_options: dict[str, Any]) -> dict[str, Any]:
    """Undisturbed ms of forwards of some lengths of both models, through their fast forwards, and the cost ratio c; the
    target's in batches; and the share of a token's forward in which nothing runs."""
    from forerun.api import load
    from forerun.bench.timeline import outside
    from forerun.draft import Draft
    from forerun.model import CausalLM
    from forerun.runtime.costs import QUIET, RUN, forward_costs, measure_costs, usual_context

    decoder = load(target, draft=draft, method="sd" if draft or own_draft(target) else "ar", **load_options)
    if context is None:
        context = usual_context(decoder.target, decoder.draft)
    found = measure_costs(decoder.target, decoder.draft, context)
    quick = min(found.target.values()) < SLOW
    batches = {rows: forward_costs(decoder.target, TOKENS, context, RUN, QUIET, rows) for rows in BATCHES if quick}
    table: dict[str, Any] = {"context": context, "target_ms": found.target, "target_ms_in_batches": batches}
    if found.draft:
        table |= {"draft_ms": found.draft, "c": round(found.c, 4)}

    def idle(model: CausalLM) -> float:
        model = model.fresh()
        deque(model.prefill([0] * context, context), maxlen=0)
        model.join(0, 1)
        return round(outside(lambda: model.forward([0], [Draft.root(0)]), model.device), 4)

    models = {"target": decoder.target, "draft": decoder.draft}
    table |= {"models": decoder.info(), "peak_mb": peak_mb()}
    return table | {"idle": {part: idle(model) for part, model in models.items() if model is not None}}


def peak_mb() -> int | None:
    """Most megabytes that this process has had in memory; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10))


def profile_facts(target: str, draft: str | None, load_options: dict[str, Any]) -> dict[str, Any] | None:
    """The profile that runs with these models use, None where they were not tuned."""
    how = (load_options[name] for name in ("device", "dtype", "weights", "draft_weights"))
    pair = pair_of(target, draft or own_draft(target), *how)
    profile = stored(pair)
    if profile is None:
        return None
    modes = {"greedy": profile.greedy, "sampling": profile.sampling}
    return {"file": str(pair.path), **{mode: asdict(choice) if choice else None for mode, choice in modes.items()}}


def info(
    as_json: common.JsonOption = False,
    with_costs: Annotated[
        bool, typer.Option("--costs", help="Measure what forwards cost by tokens and rows, and the cost ratio c.")
    ] = False,
    target: common.TargetOption = EMBEDDED,
    draft: common.DraftOption = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="With --costs: tokens that stand before, 256 by default.")
    ] = None,
    dtype: common.DtypeOption = None,
    weights: common.WeightsOption = None,
    draft_weights: common.DraftWeightsOption = None,
    device: common.DeviceOption = None,
    threads: common.ThreadsOption = None,
    trust_remote_code: common.TrustOption = False,
) -> None:
    """Show versions, methods with their default settings, the embedded pair and what was tuned; with --costs, with
    --weights and for a GGUF file, what the models run as and what forwards cost."""
    resolve(target, "target")
    if draft is not None:
        resolve(draft, "draft")
    quiet(threads)
    how = {"dtype": dtype, "weights": weights, "draft_weights": draft_weights, "device": device}
    facts = collect() | {"profile": profile_facts(target, draft, how)}
    from forerun.gguf import find

    source = resolve(target, "target")
    with_costs |= weights is not None or (isinstance(source, Path) and find(source) is not None)
    if with_costs:
        facts["costs"] = costs(target, draft, context, how | {"trust_remote_code": trust_remote_code})
    if as_json:
        print(json.dumps(facts))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for name in ("forerun", "python", "torch", "transformers", "device", "threads"):
        table.add_row(name, str(facts[name]))
    for name, settings in facts["methods"].items():
        shown = ", ".join(f"{key}={value}" for key, value in settings.items())
        table.add_row(f"method {name}", shown or "no settings")
    for mode, choice in (facts["profile"] or {}).items():
        if isinstance(choice, dict):
            shown = ", ".join(f"{key}={value}" for key, value in choice["settings"].items())
            table.add_row(f"tuned, {mode}", f"{choice['method']} {shown}: {choice['measured_speedup']:.2f}x measured")
    table.add_row("profile", (facts["profile"] or {}).get("file", "none: run forerun tune"))
    pair = facts["embedded"]
    if pair:
        sizes, loss = pair["parameters"], pair["loss"]
        table.add_row(
            "embedded target", f"{sizes['target'] / 1e6:.1f}M parameters, test loss {loss['target']:.3f} nats"
        )
        table.add_row(
            "embedded draft", f"{sizes['draft'] / 1e6:.1f}M parameters, test loss {loss['draft_distilled']:.3f} nats"
        )
        table.add_row("embedded weights", f"{facts['weights_bytes'] / 1e6:.1f} MB in {FOLDER}")
        for name, value in pair["gate"].items():
            table.add_row("gate", f"{name}: {value}")
    Console().print(table)
    if with_costs:
        for part in ("target", "draft"):
            if part in facts["costs"]["models"]:
                Console(soft_wrap=True).print(_model_line(part, facts["costs"]["models"][part]))
        Console(soft_wrap=True).print(f"memory: {facts['costs']['peak_mb']} MB at most, all of this process")
        Console().print(_costs_table(facts["costs"]))


def _model_line(part: str, model: dict[str, Any]) -> str:
    sizes = ", ".join(f"{size / 1e6:.1f} MB {kind}" for kind, size in model["weight_bytes"].items())
    return f"{part}: {sizes}; exact: {model['exact']}; {model['kernel']}; {model['threads']} threads"


def _costs_table(costs: dict[str, Any]) -> Any:
    from rich.table import Table

    counts = list(costs["target_ms"])
    table = Table(
        title=f"undisturbed ms of a forward behind {costs['context']} tokens"
        + (f"; c = {costs['c']:.3f}" if "c" in costs else "")
    )
    table.add_column("new tokens")
    for count in counts:
        table.add_column(str(count), justify="right")
    for part in ("target", "draft"):
        if f"{part}_ms" in costs:
            table.add_row(part, *(f"{costs[f'{part}_ms'].get(count, float('nan')):.2f}" for count in counts))
    for rows, times in costs["target_ms_in_batches"].items():
        table.add_row(f"target, {rows} rows", *(f"{times[count]:.2f}" if count in times else "" for count in counts))
    idle = (f"{part} {share:.0%}" for part, share in costs["idle"].items())
    table.caption = f"of a token's forward nothing runs for: {', '.join(idle)} (under the profiler)"
    return table
