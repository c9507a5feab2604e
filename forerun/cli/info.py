"""`forerun info`: versions, methods and the embedded pair; with --costs what forwards cost."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun import __version__
from forerun.api.profiles import find
from forerun.cli.common import quiet
from forerun.cli.options import JsonOption, LoadOptions, TargetOption, grouped
from forerun.methods import METHODS
from forerun.zoo import EMBEDDED, FOLDER, own_draft, resolve

BATCHES, TOKENS = (4, 16), (1, 2, 4, 8)  # rows, and tokens of each
SLOW = 100.0  # ms of a forward from which on batches would take minutes


@grouped
def info(
    as_json: JsonOption = False,
    with_costs: Annotated[
        bool, typer.Option("--costs", help="Measure what forwards cost by tokens and rows, and the cost ratio c.")
    ] = False,
    target: TargetOption = EMBEDDED,
    context: Annotated[
        int | None, typer.Option(min=1, help="With --costs: tokens in the cache, 256 by default.")
    ] = None,
    *,
    loading: LoadOptions,
) -> None:
    """Show versions, methods with their default settings, the embedded pair and what was tuned; with --costs, with
    --weights and for a GGUF file, what the models run as and what forwards cost."""
    source = resolve(target, "target")
    if loading.draft is not None:
        resolve(loading.draft, "draft")
    quiet(loading.threads)
    facts = collect() | {"profile": _profile(target, loading)}
    from forerun.backends.gguf import find as find_gguf

    if with_costs or loading.weights is not None or (isinstance(source, Path) and find_gguf(source) is not None):
        facts["costs"] = costs(target, context, loading)
    if as_json:
        print(json.dumps(facts))
    else:
        _show(facts)


def collect() -> dict[str, Any]:
    """Collect what is installed, and what the embedded pair is."""
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


def costs(target: str, context: int | None, loading: LoadOptions) -> dict[str, Any]:
    """Measure undisturbed ms of forwards of some lengths of both models, the target's also in batches, and the cost
    ratio c."""
    from forerun.api.load import load
    from forerun.backends.costs import QUIET, RUN, forward_costs, measure_costs, usual_context

    decoder = load(target, method="sd" if loading.draft or own_draft(target) else "ar", **loading.for_load())
    if context is None:
        context = usual_context(decoder.target, decoder.draft)
    found = measure_costs(decoder.target, decoder.draft, context)
    quick = min(found.target.values()) < SLOW
    batches = {rows: forward_costs(decoder.target, TOKENS, context, RUN, QUIET, rows) for rows in BATCHES if quick}
    table: dict[str, Any] = {"context": context, "target_ms": found.target, "target_ms_in_batches": batches}
    if found.draft:
        table |= {"draft_ms": found.draft, "c": round(found.c, 4)}

    return table | {"models": decoder.info(), "peak_mb": peak_mb()}


def peak_mb() -> int | None:
    """Return the most megabytes that this process has had in memory; None on systems that do not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10))


def _profile(target: str, loading: LoadOptions) -> dict[str, Any] | None:
    """Return the profile that runs with these models use; None if they were not tuned."""
    draft = loading.draft or own_draft(target)
    profile = find(target, draft, loading.device, loading.dtype, loading.weights, loading.draft_weights)
    if profile is None:
        return None
    facts = asdict(profile)
    return {"file": str(profile.pair.path), "greedy": facts["greedy"], "sampling": facts["sampling"]}


def _show(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    def listed(settings: dict[str, Any]) -> str:
        return ", ".join(f"{key}={value}" for key, value in settings.items())

    names = ("forerun", "python", "torch", "transformers", "device", "threads")
    rows = [(name, str(facts[name])) for name in names]
    rows += [(f"method {name}", listed(settings) or "no settings") for name, settings in facts["methods"].items()]
    profile = facts["profile"] or {}
    for mode in ("greedy", "sampling"):
        if choice := profile.get(mode):
            speedup = f"{choice['measured_speedup']:.2f}x measured"
            rows.append((f"tuned, {mode}", f"{choice['method']} {listed(choice['settings'])}: {speedup}"))
    rows.append(("profile", profile.get("file", "none: run forerun tune")))
    if pair := facts["embedded"]:
        sizes, loss = pair["parameters"], pair["loss"]
        for part, trained in (("target", "target"), ("draft", "draft_distilled")):
            size = f"{sizes[part] / 1e6:.1f}M parameters"
            rows.append((f"embedded {part}", f"{size}, test loss {loss[trained]:.3f} nats"))
        rows.append(("embedded weights", f"{facts['weights_bytes'] / 1e6:.1f} MB in {FOLDER}"))
        rows += [("gate", f"{name}: {value}") for name, value in pair["gate"].items()]
    table = Table(show_header=False, box=None)
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    if costs := facts.get("costs"):
        for part, model in costs["models"].items():
            if part in ("target", "draft"):
                sizes = ", ".join(f"{size / 1e6:.1f} MB {kind}" for kind, size in model["weight_bytes"].items())
                how = f"exact: {model['exact']}; {model['kernel']}; {model['threads']} threads"
                console.print(f"{part}: {sizes}; {how}", soft_wrap=True)
        console.print(f"memory: {costs['peak_mb']} MB at most, all of this process", soft_wrap=True)
        console.print(_costs_table(costs))


def _costs_table(costs: dict[str, Any]) -> Any:
    from rich.table import Table

    title = f"undisturbed ms of a forward after {costs['context']} tokens"
    table = Table(title=title + (f"; c = {costs['c']:.3f}" if "c" in costs else ""))
    counts = list(costs["target_ms"])
    table.add_column("new tokens")
    for count in counts:
        table.add_column(str(count), justify="right")
    rows = {part: costs[f"{part}_ms"] for part in ("target", "draft") if f"{part}_ms" in costs}
    rows |= {f"target, {number} rows": times for number, times in costs["target_ms_in_batches"].items()}
    for name, times in rows.items():
        table.add_row(name, *(f"{times[count]:.2f}" if count in times else "" for count in counts))
    return table
