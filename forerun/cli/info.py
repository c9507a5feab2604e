"""`forerun info`: what is installed, which methods there are, and what the embedded pair is."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated, Any

import typer

from forerun import __version__
from forerun.methods import METHODS
from forerun.zoo import FOLDER


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
        "weights_bytes": sum(path.stat().st_size for path in FOLDER.rglob("*.safetensors")),
    }


def info(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show versions, methods with their default settings, and the embedded pair."""
    facts = collect()
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
