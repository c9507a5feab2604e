"""The methods: their names and settings. METHODS has them by name.

A method is a source of drafts with a rule for their length. `forerun.drafters.build` has a table of
each. The names are:

| source | fixed or by costs | by the draft's probabilities | by a trained layer or calibration |
|---|---|---|---|
| none | ar | | |
| a draft model | sd | confidence, cumulative | pacer |
| a draft model and phrases | ouroboros | | pacer-ouroboros |
| repeated suffixes | suffix | | |
| suffixes, else another method | hybrid | | |
| a head | lyanna, eagle | | pacer-lyanna, pacer-eagle |

Importing this does not import torch, so that the command line refuses a bad setting at once. What
runs is in `forerun.drafters`.
"""

from __future__ import annotations

from forerun.methods.base import Method, Parts
from forerun.methods.head import Eagle, Lyanna, PacerEagle, PacerLyanna
from forerun.methods.hybrid import Hybrid
from forerun.methods.lookup import (
    METHODS,
    default_method,
    is_method,
    method,
    method_class,
    parse_value,
    settings_of,
)
from forerun.methods.model_chain import SD, Confidence, Cumulative, Drafting, Pacer
from forerun.methods.phrases import Ouroboros, PacerOuroboros
from forerun.methods.plain import AR
from forerun.methods.suffix import Suffix

__all__ = [
    "AR",
    "METHODS",
    "SD",
    "Confidence",
    "Cumulative",
    "Drafting",
    "Eagle",
    "Hybrid",
    "Lyanna",
    "Method",
    "Ouroboros",
    "Pacer",
    "PacerEagle",
    "PacerLyanna",
    "PacerOuroboros",
    "Parts",
    "Suffix",
    "default_method",
    "is_method",
    "method",
    "method_class",
    "parse_value",
    "settings_of",
]

_IN_ORDER: tuple[type[Method], ...] = (
    *(AR, SD, Pacer, Suffix, Hybrid, Ouroboros, PacerOuroboros),
    *(Lyanna, PacerLyanna, Eagle, PacerEagle, Confidence, Cumulative),
)
METHODS.update({cls.name: cls for cls in _IN_ORDER})
