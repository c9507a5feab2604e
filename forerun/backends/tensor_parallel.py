"""A target whose weights are split among several processes (ranks) that `torchrun` started.

transformers splits the weights and adds up the ranks' results. Every rank runs the whole loop: the same requests, its
own draft model and heads, the same decisions. What could differ is made equal: all use the first rank's clock and its
random state. Before each forward of the target the ranks compare what they are about to run, so that a difference ends
the job and never hangs it.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from time import perf_counter_ns
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, distributed
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import is_accelerate_available

from forerun.engine.target import Capture
from forerun.failures import TargetLostError
from forerun.model.batch import Inputs
from forerun.model.causal_lm import CausalLM
from forerun.model.eager import EagerForward
from forerun.model.kv_cache import KVCache

TIMEOUT = timedelta(minutes=10)  # of a rank that waits for the rest, which may still load
LOST = 1  # the exit status
_NETWORK = re.compile(r"\[[^]]*\bgloo/[^]]*\]|Gloo |NCCL ")  # errors of the network that have no class of their own
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_T = TypeVar("_T")


class RankLostError(TargetLostError):
    """Another rank has ended, cannot be reached, or was about to do something else."""


@dataclass(frozen=True)
class Ranks:
    """The processes that run one target together.

    Attributes:
        rank, size: this rank's number, and the number of ranks.
        control: a gloo group of all ranks, for control messages.
    """

    rank: int
    size: int
    control: Any

    @property
    def device(self) -> str:
        """Return this rank's device."""
        return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"

    def sample_alike(self) -> None:
        """Set torch's random state, which replaces missing seeds, to the first rank's."""
        torch.set_rng_state(self.share(torch.get_rng_state()))

    def barrier(self, place: bytes) -> float:
        """Wait for all ranks; return the first rank's clock in seconds. Raises RankLostError if a rank is gone or at
        another place."""
        digest = int.from_bytes(blake2b(place, digest_size=7).digest(), "little")
        own = torch.tensor([digest, perf_counter_ns()])
        found = [torch.empty_like(own) for _ in range(self.size)]
        with network():
            distributed.all_gather(found, own, group=self.control)
        for rank, (other, _) in enumerate(torch.stack(found).tolist()):
            if other != digest:
                raise RankLostError(f"rank {rank} was about to do something else")
        return float(found[0][1]) / 1e9

    def clock(self) -> float:
        return self.barrier(b"clock")

    def share(self, found: _T) -> _T:
        """Return the first rank's value."""
        box = [found]
        with network():
            distributed.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def all(self, flag: bool) -> bool:
        """Return whether the flag is set on all ranks."""
        own = torch.tensor([flag])
        found = [torch.empty_like(own) for _ in range(self.size)]
        with network():
            distributed.all_gather(found, own, group=self.control)
        return all(map(bool, found))


class ShardedLM(CausalLM):
    """A target of which this rank holds a part of the weights, keys and values."""

    def __init__(self, model: PreTrainedModel, ranks: Ranks) -> None:
        super().__init__(model, ShardedForward(model, ranks))
        self.ranks = ranks

    def clock(self) -> float:
        return self.ranks.clock()

    def agreed(self, found: _T) -> _T:
        return self.ranks.share(found)

    def unanimous(self, flag: bool) -> bool:
        return self.ranks.all(flag)


class ShardedForward(EagerForward):
    """A forward before which the ranks compare what they are about to run."""

    def __init__(self, model: PreTrainedModel, ranks: Ranks) -> None:
        super().__init__(model)
        self.ranks = ranks

    def __call__(
        self, inputs: Inputs, cache: KVCache, logits: bool, capture: Capture
    ) -> tuple[Tensor | None, Tensor | None]:
        lengths = [cache.length(id) for id in cache.ids]
        place = [list(inputs.rows), list(map(list, inputs.depths)), lengths, logits, capture]
        if inputs.tokens is not None:
            place.append(list(map(list, inputs.tokens)))
        self.ranks.barrier(repr(place).encode())
        with network():
            return super().__call__(inputs, cache, logits, capture)


@contextmanager
def network() -> Iterator[None]:
    """Turn errors of the connection to other ranks into a RankLostError."""
    try:
        yield
    except RankLostError:
        raise
    except RuntimeError as error:
        text = str(error).strip() or type(error).__name__
        if not isinstance(error, distributed.DistError) and not _NETWORK.match(text):
            raise
        reason = re.sub(r"^\[[^]]*\]\s*", "", text.splitlines()[0]).split(". ")[0]  # gloo adds advice
        raise RankLostError(f"another rank has ended or does not answer: {reason}") from error


def check_shape(config: PreTrainedConfig, name: str) -> None:
    """Raise ValueError for a target that the ranks cannot split evenly. They need not be connected yet."""
    check_ranks()
    size = int(os.environ["WORLD_SIZE"])
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(f"target {name!r}: transformers cannot split models of type {config.model_type!r}")
    for part in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, part, None)
        if count is not None and count % size:
            raise ValueError(f"target {name!r} has {part} {count}, which {size} ranks cannot split evenly")


def check_ranks() -> None:
    """Raise ValueError unless this process is one of several that torchrun started."""
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing or int(os.environ["WORLD_SIZE"]) < 2:
        raise ValueError(
            "tensor parallelism needs at least 2 processes: start them with `torchrun --nproc-per-node 2 -m forerun "
            "generate --tensor-parallel ...`"
        )


def check_machine() -> None:
    """Raise ValueError if a package is missing, or the machine has fewer GPUs than ranks."""
    if not is_accelerate_available():
        raise ValueError("tensor parallelism needs the package accelerate: pip install '.[tensor-parallel]'")
    here = max(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ["LOCAL_RANK"]) + 1)
    if torch.cuda.is_available() and torch.cuda.device_count() < here:
        raise ValueError(f"{here} ranks on this machine need a GPU each; there are {torch.cuda.device_count()}")


def ranks() -> Ranks:
    """Connect the ranks that torchrun started and return them. Raises the ValueErrors of `check_ranks` and
    `check_machine`."""
    global _ranks, _store
    if _ranks is None:
        check_ranks()
        if distributed.is_initialized():
            check_machine()
        else:
            found, rank, size = next(distributed.rendezvous("env://", timeout=TIMEOUT))
            _store = distributed.PrefixStore("forerun", found)
            check_machine()  # the store lets one rank alone print its error
            kind, device = "gloo", None
            if torch.cuda.is_available():
                kind, device = "nccl", torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                torch.cuda.set_device(device)
            distributed.init_process_group(
                kind, store=found, rank=rank, world_size=size, timeout=TIMEOUT, device_id=device
            )
        control = distributed.new_group(backend="gloo", timeout=TIMEOUT)
        _ranks = Ranks(distributed.get_rank(), distributed.get_world_size(), control)
    return _ranks


_ranks: Ranks | None = None
_store: Any = None  # shared by all ranks while torchrun runs; None if a caller had connected them


@contextmanager
def together() -> Iterator[Ranks]:
    """Run a command on all ranks, of which the first alone prints. If a rank is lost, the remaining ones print one line
    together and end. One rank raises a ValueError, and the rest end. Raises ValueError without ranks."""
    check_ranks()
    signal.signal(signal.SIGTERM, lambda *_: _end("it was asked to stop, as another rank or the job has ended"))
    try:
        with network():
            found = ranks()
        if found.rank:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
        yield found
        found.barrier(b"end")
    except RankLostError as error:
        _end(str(error))
    except ValueError:  # a user's mistake, which all ranks see
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all ranks once one has; this one is to print
        if not _is_first():
            os._exit(2)
        raise


def _end(reason: str) -> NoReturn:
    """Print the reason, unless another rank has printed one, and end the process at once."""
    if _is_first():
        name = os.environ.get("RANK", "?"), os.environ.get("WORLD_SIZE", "?")
        line = f"forerun: tensor parallel rank {name[0]} of {name[1]} stops: {' '.join(reason.split())}\n"
        sys.stdout.flush()
        os.write(2, line.encode())
    os._exit(LOST)


def _is_first() -> bool:
    """Return whether this is the first rank to ask, which alone prints why the job ends."""
    if _store is not None:
        with suppress(Exception):  # the store ends with the job
            return bool(_store.add("printed", 1) == 1)
    return True
