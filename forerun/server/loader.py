"""How a server or a batch job gets its decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.decoder import Decoder


@dataclass(frozen=True)
class Loader:
    """Loads a decoder where it is called: in the thread that computes, or on another node.

    Attributes:
        method: a name, its settings, or None for `forerun.load`'s choice.
        options: other arguments of `forerun.load`.
        threads: of torch, for the thread that calls.
        is_shared: clients do not know each other. So nothing that was decoded for one is drafted for another: rejected
            drafts, which a client may ask for, would be words of other clients' answers.
    """

    target: str
    method: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    threads: int | None = None
    is_shared: bool = False

    def __call__(self) -> Decoder:
        import torch

        from forerun.api import load

        if self.threads:
            torch.set_num_threads(self.threads)
        decoder = load(self.target, method=self.method, **self.options)
        if self.is_shared:
            decoder.pools = None
        return decoder
