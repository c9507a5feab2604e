"""What ran when: operations of a CPU or kernels of a GPU within a step, by torch's profiler, which takes time too."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "forerun"


@dataclass(frozen=True)
class Activity:
    """What ran within a marked stretch of time.

    Attributes:
        ms: how long that was.
        parts: (begin in ms, ms, name), none within another; of a GPU its kernels, else operations that Python called.
    """

    ms: float
    parts: list[tuple[float, float, str]]

    @property
    def busy(self) -> float:
        """ms in which anything ran."""
        busy, last = 0.0, 0.0
        for begin, length, _ in sorted(self.parts):
            busy += max(0.0, begin + length - max(begin, last))
            last = max(last, begin + length)
        return busy


@contextmanager
def _still() -> Iterator[None]:
    """Without what torch's profiler writes on stderr from C++ as it begins and ends; no setting prevents that."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@contextmanager
def profiled(device: torch.device, found: list[Activity]) -> Iterator[Callable[[], Any]]:
    """Gives what marks a stretch of time; they are in `found` at the end."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]

    @contextmanager
    def mark() -> Iterator[None]:
        with record_function(_MARK):
            yield
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    with _still(), profile(activities=kinds) as profiler:
        yield mark
    events = list(profiler.events() or [])
    for stretch in events:
        if stretch.name != _MARK or stretch.device_type != DeviceType.CPU:
            continue
        begin, end = stretch.time_range.start, stretch.time_range.end
        parts = [
            ((event.time_range.start - begin) / 1000, event.time_range.elapsed_us() / 1000, event.name)
            for event in events
            if begin <= event.time_range.start < end and event.name != _MARK
            if (event.device_type == DeviceType.CUDA if device.type == "cuda" else event.cpu_parent is stretch)
        ]
        found.append(Activity((end - begin) / 1000, parts))


def outside(run: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """The share of a call's time in which no kernel, or no operation of a CPU, runs: its middle one of `repeats`."""
    found: list[Activity] = []
    for _ in range(3):
        run()
    with profiled(device, found) as mark:
        for _ in range(repeats):
            with mark():
                run()
    return sorted(1 - work.busy / work.ms for work in found)[repeats // 2]
