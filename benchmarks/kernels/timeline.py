"""A picture of a step: its phases, and what ran within it on a CPU or a GPU.

    python -m benchmarks.kernels.timeline --methods ar,sd --dataset stdlib-test --out FOLDER

All options are those of `forerun bench`. The first prompts are decoded, as many as --batch says.
torch's profiler takes time too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.command import run
from forerun.api.load import Decoder
from forerun.bench.measure import forget_phrases
from forerun.bench.models import load_decoders, load_prompts
from forerun.bench.report import PHASES
from forerun.cli.bench import bench, planned
from forerun.engine.engine import Step
from forerun.sampling.params import SamplingParams

SKIPPED = 4  # steps before the profiler starts
PROFILED = 3  # steps under the profiler, of which the last is shown
KINDS = {"product": "#7b2cbf", "attention": "#f3722c", "other": "#90be6d"}  # with their colours
WORDS = {
    "attention": ("attention", "flash", "fmha", "softmax"),
    "product": ("mm", "linear", "gemv", "cutlass", "nvjet"),
}
MARK = "forerun"  # the name of a marked stretch among the profiler's events


@dataclass(frozen=True)
class Activity:
    """What ran within a marked stretch of time.

    Attributes:
        ms: how long the stretch was.
        parts: (begin in ms, ms, name), none within another. On a GPU they are its kernels, else
            the operations that Python called.
    """

    ms: float
    parts: list[tuple[float, float, str]]

    @property
    def busy(self) -> float:
        """Return the ms in which anything ran."""
        busy = 0.0
        last = 0.0
        for begin, length, _ in sorted(self.parts):
            busy += max(0.0, begin + length - max(begin, last))
            last = max(last, begin + length)
        return busy


@contextmanager
def _still() -> Iterator[None]:
    """Discard what torch's profiler writes to stderr from C++, which no setting prevents."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@contextmanager
def profiled(
    device: torch.device, activities: list[Activity]
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Yield a context that marks a stretch of time; at the end they are in `activities`."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]

    @contextmanager
    def mark() -> Iterator[None]:
        with record_function(MARK):
            yield
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    with _still(), profile(activities=kinds) as profiler:
        yield mark
    events = list(profiler.events() or [])
    activities += [
        _activity(event, events, device)
        for event in events
        if event.name == MARK and event.device_type == DeviceType.CPU
    ]


def _activity(stretch: Any, events: list[Any], device: torch.device) -> Activity:
    """Return what ran within a stretch of time."""
    begin = stretch.time_range.start
    end = stretch.time_range.end

    def is_part(event: Any) -> bool:
        if event.name == MARK or not begin <= event.time_range.start < end:
            return False
        if device.type == "cuda":
            return event.device_type == DeviceType.CUDA
        return event.cpu_parent is stretch

    parts = []
    for event in filter(is_part, events):
        times = event.time_range
        parts.append(((times.start - begin) / 1000, times.elapsed_us() / 1000, event.name))
    return Activity((end - begin) / 1000, parts)


def step_of(
    decoder: Decoder, prompts: list[list[int]], params: SamplingParams
) -> tuple[Step, Activity] | None:
    """Return one step in the middle of the output for a batch, as its first row saw it.

    It is None if a row ends too soon.
    """
    engine = decoder.engine
    ids = [engine.add(decoder.request(prompt, params)) for prompt in prompts]
    activities: list[Activity] = []
    steps: list[Step] = []
    try:
        number = 0
        while number < SKIPPED or len(engine.running) < len(ids):  # all rows must have joined
            if any(step.finish_reason for step in engine.step()):
                return None
            number += 1
        with profiled(decoder.target.device, activities) as mark:
            for _ in range(PROFILED):
                with mark():
                    steps = engine.step()
                if any(step.finish_reason for step in steps):
                    return None
        return next(step for step in steps if step.id == ids[0]), activities[-1]
    finally:
        for id in ids:
            engine.abort(id)
        engine.step()


def kind_of(name: str) -> str:
    """Return the kind of an operation or kernel, by its name."""
    for kind, words in WORDS.items():
        if any(word in name.lower() for word in words):
            return kind
    return "other"


def plot_timeline(title: str, step: Step, work: Activity, path: Path) -> None:
    """Draw the step's phases above what ran."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 2.6), layout="constrained")
    phases = {
        "draft": step.draft_seconds,
        "policy": step.policy_seconds,
        "verify": step.verify_seconds,
    }
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
    axes.set_title(
        f"{title}: one step of {work.ms:.2f} ms, {len(step.tokens)} tokens; nothing ran for "
        f"{idle:.2f} ms"
    )
    axes.legend(ncols=7, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.3))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


@wraps(bench)
def main(**given: Any) -> None:
    plan, files = planned(given)
    out: Path | None = given["out"]
    if out is None:
        raise ValueError("--out is missing: the folder for the pictures")
    datasets, tokenizer = load_prompts(plan, files)
    decoders, _ = load_decoders(plan, tokenizer)
    prompts = [list(prompt.tokens or ()) for prompt in next(iter(datasets.values()))[: plan.batch]]
    out.mkdir(parents=True, exist_ok=True)
    for name, decoder in decoders.items():
        decoder.generate(prompts, plan.params())  # the first call is slow
        forget_phrases(decoder)
        result = step_of(decoder, prompts, plan.params())
        if result is None:
            print(f"{name}: an output ends too soon: give a larger --max-new-tokens")
            continue
        step, work = result
        path = out / f"timeline-{name}.png"
        plot_timeline(name, step, work, path)
        print(f"{name}: {work.ms:.3f} ms, of which something ran in {work.busy:.3f}: {path}")


if __name__ == "__main__":
    run(main)
