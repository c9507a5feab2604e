"""Compare the sizes that a configuration claims with the weights of its files."""

from __future__ import annotations

from torch import nn

Shapes = dict[str, tuple[int, ...]]


def check_shapes(module: nn.Module, stored: Shapes) -> None:
    """Raise ValueError unless these are exactly the tensors of a module."""
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    for name in sorted(wanted.keys() & stored.keys()):
        if wanted[name] != stored[name]:
            sizes = f"{name} is {list(wanted[name])}, and in its file {list(stored[name])}"
            raise ValueError(f"by its config.json {sizes}")
    if wanted.keys() != stored.keys():
        raise ValueError(f"its weights do not fit its configuration ({min(wanted.keys() ^ stored.keys())})")


def lacking(names: list[str]) -> str:
    """Return the message for missing weights."""
    first, *rest = sorted(names)
    return f"no weights for {first}" + f" and {len(rest)} more" * bool(rest)
