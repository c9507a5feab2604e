"""`forerun info`: versions and the methods' settings, or what a GGUF file is and needs."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun import __version__
from forerun.cli.common import quiet
from forerun.cli.options import JsonOption
from forerun.methods import METHODS
from forerun.zoo import locate, own_draft


def info(
    model: Annotated[
        str | None,
        typer.Argument(help="Only show what this GGUF file, or fetched model, is and needs."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show versions, with --json also the methods' settings."""
    if model is not None:
        facts = file_facts(model)
    else:
        quiet()
        facts = collect()
    if as_json:
        print(json.dumps(facts))
    else:
        from rich.console import Console
        from rich.table import Column, Table

        table = Table("", Column(overflow="fold"), show_header=False, box=None)
        for name, value in facts.items():
            if name != "methods":
                table.add_row(name, _shown(name, value))
        Console(soft_wrap=True, highlight=False).print(table)


def file_facts(model: str) -> dict[str, Any]:
    """Return what a GGUF file holds, what runs it, and the bytes of weights, keys and values, also of the keys and
    values of the draft that is fetched with it. Needs no torch. Raises ValueError for other models."""
    from forerun.csrc.library import missing, variant
    from forerun.zoo.gguf_file import open_gguf

    path = _gguf(model)
    if path is None:
        raise ValueError(f"{model!r} is no GGUF file; forerun info shows these alone")
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
        "kv_bytes_at_full_context": context * file.kv_bytes,
        "bytes_at_full_context": file.memory + context * file.kv_bytes,
        **_draft_facts(model, context),
    }


def _draft_facts(model: str, context: int) -> dict[str, int]:
    """Return the bytes that the keys and values of a model's own draft take, if it has one that is a GGUF file."""
    from forerun.zoo.gguf_file import open_gguf

    name = own_draft(model)
    path = _gguf(name) if name is not None and name != model else None
    if path is None:
        return {}
    file = open_gguf(path)
    reach = min(context, file.own("context_length", int))
    return {
        "draft_kv_bytes_per_token": file.kv_bytes,
        "draft_kv_bytes_at_full_context": reach * file.kv_bytes,
    }


def _gguf(model: str) -> Path | None:
    """Return the GGUF file that a name stands for, or None if it stands for another model."""
    from forerun.zoo.gguf_file import find

    source = locate(model, "target")
    return find(source) if isinstance(source, Path) else None


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{size / 1e6:.1f} MB {name}" for name, size in value.items())
    if "per_token" in name:
        return f"{value:,} bytes"
    return f"{value / 1e6:,.1f} MB" if "bytes" in name else str(value)


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
