"""What ran when: operations of a CPU or kernels of a GPU within a step, by torch's profiler, which takes time too."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from forerun.api import Decoder
from forerun.bench.profile import PHASES
from forerun.engine import Step
from forerun.params import SamplingParams

SKIPPED, PROFILED = 4, 3  # steps: those before, and those under the profiler, of which the last is shown
_MARK = "forerun"
KINDS = {"product": "#7b2cbf", "attention": "#f3722c", "other": "#90be6d"}
_WORDS = {
    "attention": ("attention", "flash", "fmha", "softmax"),
    "product": ("mm", "linear", "gemv", "cutlass", "nvjet"),
}


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
def _profiled(device: torch.device, found: list[Activity]) -> Iterator[Callable[[], Any]]:
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
    with _profiled(device, found) as mark:
        for _ in range(repeats):
            with mark():
                run()
    return sorted(1 - work.busy / work.ms for work in found)[repeats // 2]


def step_of(decoder: Decoder, prompts: list[list[int]], params: SamplingParams) -> tuple[Step, Activity] | None:
    """One step in the middle of the output for a batch, as its first row saw it; None where a row ends too soon."""
    engine, found = decoder.engine, list[Activity]()
    ids = [engine.add(decoder.request(prompt, params)) for prompt in prompts]
    try:
        done, number = False, 0
        while not done and (number < SKIPPED or len(engine.running) < len(ids)):  # all must have joined
            done, number = any(step.finish_reason for step in engine.step()), number + 1
        with _profiled(decoder.target.device, found) as mark:
            for _ in range(0 if done else PROFILED):
                with mark():
                    steps = engine.step()
                if any(step.finish_reason for step in steps):
                    return None
        return (next(step for step in steps if step.id == ids[0]), found[-1]) if found else None
    finally:
        for id in ids:
            engine.abort(id)
        engine.step()


def kind_of(name: str) -> str:
    """What of KINDS an operation or kernel is, by its name."""
    return next((kind for kind, words in _WORDS.items() if any(word in name.lower() for word in words)), "other")


def plot_timeline(title: str, step: Step, work: Activity, path: Path) -> None:
    """Draws the step's phases above what ran."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 2.6), layout="constrained")
    phases = {"draft": step.draft_seconds, "policy": step.policy_seconds, "verify": step.verify_seconds}
    left = 0.0
    for name, seconds in phases.items():
        axes.barh(0, 1000 * seconds, left=left, color=PHASES[name], label=name)
        left += 1000 * seconds
    axes.barh(0, max(0.0, work.ms - left), left=left, color=PHASES["rest"], label="rest")
    for kind, colour in KINDS.items():
        spans = [(begin, length) for begin, length, name in work.parts if kind_of(name) == kind]
        axes.broken_barh(spans, (0.6, 0.8), facecolors=colour, linewidth=0, label=kind)
    axes.set_yticks([0, 1], ["phases", "ran"])
    axes.invert_yaxis()
    axes.set(xlabel="ms, under the profiler", xlim=(0, work.ms))
    idle = work.ms - work.busy
    axes.set_title(f"{title}: one step of {work.ms:.2f} ms, {len(step.tokens)} tokens; nothing ran for {idle:.2f} ms")
    axes.legend(ncols=7, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.3))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
