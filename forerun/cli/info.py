"""`forerun info`: versions; with --costs what forwards cost."""

from __future__ import annotations

import json
import platform
import sys
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun import __version__
from forerun.cli.common import quiet
from forerun.cli.options import JsonOption, LoadOptions, TargetOption, grouped
from forerun.methods import METHODS
from forerun.zoo import EMBEDDED, locate, own_draft


@grouped
def info(
    model: Annotated[
        str | None, typer.Argument(help="Only show what this GGUF file, or fetched model, is and needs.")
    ] = None,
    as_json: JsonOption = False,
    with_costs: Annotated[
        bool, typer.Option("--costs", help="Load the models and measure what forwards cost, and the cost ratio c.")
    ] = False,
    target: TargetOption = EMBEDDED,
    *,
    loading: LoadOptions,
) -> None:
    """Show versions, with --json also the methods' settings. With --costs also what the models run as, and what their
    forwards cost."""
    if model is not None:
        facts = file_facts(model)
        if as_json:
            print(json.dumps(facts))
        else:
            _print_rows([(name, _shown(name, value)) for name, value in facts.items()])
        return
    locate(target, "target")
    if loading.draft is not None:
        locate(loading.draft, "draft")
    quiet(loading.threads)
    facts = collect()
    if with_costs:
        facts["costs"] = costs(target, loading)
    if as_json:
        print(json.dumps(facts))
    else:
        _show(facts)


def file_facts(model: str) -> dict[str, Any]:
    """Return what a GGUF file holds, and what runs it. Needs no torch. Raises ValueError for other models."""
    from forerun.csrc.library import missing, variant
    from forerun.zoo.gguf_file import find as find_gguf
    from forerun.zoo.gguf_file import open_gguf

    source = locate(model, "target")
    path = find_gguf(source) if isinstance(source, Path) else None
    if path is None:
        raise ValueError(f"{model!r} is no GGUF file; for other models: forerun info --target {model}")
    file, kernel = open_gguf(path), variant()
    sizes = file.bytes_by_type
    context = file.own("context_length", int)
    return {
        "file": str(path),
        "architecture": file.architecture,
        "weights": sizes,
        "bits_per_weight": round(8 * sum(sizes.values()) / file.weights, 2),
        "kernel": f"C for {kernel}" if kernel is not None else f"torch: {missing()}",
        "context": context,
        "weight_bytes": file.memory,
        "kv_bytes_per_token": file.kv_bytes,
        "bytes_at_full_context": file.memory + context * file.kv_bytes,
    }


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{size / 1e6:.1f} MB {name}" for name, size in value.items())
    return f"{value / 1e6:,.3f} MB" if "bytes" in name else str(value)


def collect() -> dict[str, Any]:
    """Return versions, the machine, and the methods' settings."""
    import torch

    return {
        "forerun": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "methods": {name: asdict(settings()) for name, settings in METHODS.items()},
    }


def costs(target: str, loading: LoadOptions) -> dict[str, Any]:
    """Measure ms of forwards of both models on a quiet machine, and the cost ratio c."""
    from forerun.api.load import load
    from forerun.backends.costs import measure_costs, usual_context

    decoder = load(target, method="sd" if loading.draft or own_draft(target) else "ar", **loading.for_load())
    context = usual_context(decoder.target, decoder.draft)
    found = measure_costs(decoder.target, decoder.draft, context)
    table: dict[str, Any] = {"context": context, "target_ms": found.target}
    if found.draft:
        table |= {"draft_ms": found.draft, "c": round(found.c, 4)}
    return table | {"models": decoder.info(), "peak_mb": peak_mb()}


def peak_mb() -> int | None:
    """Return this process's peak memory in megabytes; None on systems that do not count it."""
    with suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return round(peak / (2**20 if sys.platform == "darwin" else 2**10))
    return None


def _show(facts: dict[str, Any]) -> None:
    names = ("forerun", "python", "torch", "transformers", "device", "threads")
    rows = [(name, str(facts[name])) for name in names]
    if costs := facts.get("costs"):
        for part in ("target", *["draft"] * ("draft_ms" in costs)):
            model = costs["models"][part]
            sizes = _shown("", model["weight_bytes"])
            rows.append((part, f"{sizes}; exact: {model['exact']}; {model['kernel']}; {model['threads']} threads"))
            times = costs[f"{part}_ms"].items()
            rows.append((f"{part}, ms of N tokens", ", ".join(f"{count}: {time:.2f}" for count, time in times)))
        rows.append(("context", f"{costs['context']} tokens" + (f"; c = {costs['c']:.3f}" if "c" in costs else "")))
        rows.append(("memory", f"{costs['peak_mb']} MB at most, all of this process"))
    _print_rows(rows)


def _print_rows(rows: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    table = Table("", Column(overflow="fold"), show_header=False, box=None)
    for row in rows:
        table.add_row(*row)
    Console(soft_wrap=True, highlight=False).print(table)
