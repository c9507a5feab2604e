"""Lazy imports: modules that are imported when first used.

A method's settings, stop rule and drafter are in one file. The command line must refuse a bad setting in a fifth of a
second, and torch takes seconds to import. So these files get torch, NumPy and what imports them from here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

    from forerun.backends import quantised_heads
    from forerun.heads import pre_verifier, quick
    from forerun.methods import beams, pools
    from forerun.planning import tree_plan
    from forerun.sampling import probabilities, seeded, threads
    from forerun.sampling import sampler as sampling
else:

    class _Later:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            found = getattr(import_module(self._name), name)
            self.__dict__[name] = found  # from now on an ordinary attribute
            return found

    np, torch = _Later("numpy"), _Later("torch")
    beams, pools = _Later("forerun.methods.beams"), _Later("forerun.methods.pools")
    tree_plan = _Later("forerun.planning.tree_plan")
    pre_verifier, quick = _Later("forerun.heads.pre_verifier"), _Later("forerun.heads.quick")
    quantised_heads = _Later("forerun.backends.quantised_heads")
    sampling, probabilities, seeded, threads = (
        _Later(f"forerun.sampling.{name}")
        for name in ("sampler", "probabilities", "seeded", "threads")
    )

__all__ = [
    "beams",
    "np",
    "pools",
    "pre_verifier",
    "probabilities",
    "quantised_heads",
    "quick",
]
__all__ += ["sampling", "seeded", "threads", "torch", "tree_plan"]
