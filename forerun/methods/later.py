"""Modules that take long to import, imported when something of theirs is first used.

A method's settings, its stop rule and its drafter stand in one file, and settings are to be refused before torch is
there: it takes seconds, a bad setting a fifth of one. So these files take what brings torch or NumPy from here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

    from forerun.heads import pre_verifier, quick
    from forerun.methods import pools
    from forerun.sampling import probabilities, seeded
    from forerun.sampling import sampler as sampling
else:

    class _Later:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            found = getattr(import_module(self._name), name)
            self.__dict__[name] = found  # the next time this is an attribute like others
            return found

    np, torch = _Later("numpy"), _Later("torch")
    probabilities, seeded = _Later("forerun.sampling.probabilities"), _Later("forerun.sampling.seeded")
    sampling = _Later("forerun.sampling.sampler")
    pools, pre_verifier, quick = map(
        _Later, ("forerun.methods.pools", "forerun.heads.pre_verifier", "forerun.heads.quick")
    )

__all__ = ["np", "pools", "pre_verifier", "probabilities", "quick", "sampling", "seeded", "torch"]
