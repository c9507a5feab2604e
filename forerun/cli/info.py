"""`forerun info`: versions and the methods' settings, or what a GGUF file holds and needs."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated, Any

import typer

from forerun import __version__
from forerun.cli.common import quiet
from forerun.cli.options import JsonOption
from forerun.methods import METHODS
from forerun.zoo import ModelSource


def info(
    model: Annotated[
        str | None,
        typer.Argument(
            help=(
                "A GGUF file, or a downloaded model by its name: show only what this file holds "
                "and how much memory it needs."
            )
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show versions and the device, or facts about a model file.

    With --json it shows the settings of all methods as well.
    """
    quiet()
    facts = collect() if model is None else file_facts(model)
    if as_json:
        print(json.dumps(facts))
    else:
        _print_table(facts)


def _print_table(facts: dict[str, Any]) -> None:
    """Print facts, a line each, without the methods' settings."""
    from rich.console import Console
    from rich.table import Column, Table

    table = Table("", Column(overflow="fold"), show_header=False, box=None)
    for name, value in facts.items():
        if name != "methods":
            table.add_row(name, _shown(name, value))
    Console(soft_wrap=True, highlight=False).print(table)


def file_facts(model: str) -> dict[str, Any]:
    """Return what a GGUF file holds, which code runs it, and how many bytes it needs.

    The bytes are those of weights, of keys and values, and of keys and values of the draft that is
    downloaded with the model. For a file that loading refuses, the kernel is "none", with the
    reason, and only the bytes in the file are shown.

    Raises ValueError for other models.
    """
    from forerun.backends.facts import kernel_of_file
    from forerun.zoo.gguf_file import open_gguf

    source = ModelSource.parse(model, "target")
    source.check()
    if source.gguf is None:
        raise ValueError(f"{model!r} is no GGUF file, and forerun info shows facts only of these")
    file = open_gguf(source.gguf)
    if not file.weights:
        raise ValueError(f"{model!r} has no tensors")
    sizes = file.bytes_by_type
    facts = {
        "file": str(source.gguf),
        "architecture": file.architecture,
        "weights": sizes,
        "bits_per_weight": round(8 * sum(sizes.values()) / file.weights, 2),
    }
    try:
        facts["kernel"] = kernel_of_file(source.gguf)
    except ValueError as error:
        return facts | {"kernel": f"none: {error}"}
    context = file.own("context_length", int)
    return facts | {
        "context": context,
        "weight_bytes": file.memory,
        "kv_bytes_per_token": file.kv_bytes,
        "kv_bytes_at_full_context": context * file.kv_bytes,
        "bytes_at_full_context": file.memory + context * file.kv_bytes,
        **_draft_facts(source.own_draft(), context),
    }


def _draft_facts(draft: ModelSource | None, context: int) -> dict[str, int]:
    """Return the bytes of a draft's keys and values, {} without a draft that is a GGUF file.

    `context` is the context length of the target in tokens.
    """
    from forerun.zoo.gguf_file import open_gguf

    if draft is None or draft.gguf is None:
        return {}
    file = open_gguf(draft.gguf)
    draft_context = min(context, file.own("context_length", int))
    return {
        "draft_kv_bytes_per_token": file.kv_bytes,
        "draft_kv_bytes_at_full_context": draft_context * file.kv_bytes,
    }


def _shown(name: str, value: Any) -> str:
    """Return a fact as text."""
    if isinstance(value, dict):
        return ", ".join(f"{size / 1e6:.1f} MB {kind}" for kind, size in value.items())
    if "per_token" in name:
        return f"{value:,} bytes"
    if "bytes" in name:
        return f"{value / 1e6:,.1f} MB"
    return str(value)


def collect() -> dict[str, Any]:
    """Return versions, facts about the machine, and the methods' settings."""
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
