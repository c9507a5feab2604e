"""`forerun doctor`: what this machine and installation have, and what to do where something lacks.

Each check returns findings, and none changes anything.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from time import perf_counter

import typer

from forerun import __version__
from forerun.cli.common import quiet, shown_size
from forerun.cli.options import JsonOption
from forerun.csrc.build import HERE, sources_id
from forerun.csrc.cores import physical_cores, usable_cores
from forerun.csrc.library import VARIABLE, build_id, library, missing, variant, variants
from forerun.files import home
from forerun.zoo import MODELS, QWEN_CODER, SMOLLM2, find
from forerun.zoo.cache import Entry, entries

# What a model takes beside its file: keys and values, buffers, Python and torch.
MEMORY_PER_FILE = 1.2
MEMORY_BESIDE = 10**9
READ_BYTES = 2**28  # read to measure the speed of the memory; larger than processors' caches
READ_TIMES = 7
SHOWN_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "gguf")
# The modules that an extra of forerun needs, by the extra's name.
EXTRA_MODULES = {
    "serve": ("fastapi", "uvicorn", "prometheus_client"),
    "grammar": ("llguidance",),
    "ray": ("ray",),
}


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        subject: what was looked at.
        text: what was found.
        advice: what to do about it; "" if nothing.
        is_problem: whether forerun runs badly, or not at all, until that is done.
    """

    subject: str
    text: str
    advice: str = ""
    is_problem: bool = False


def doctor(as_json: JsonOption = False) -> None:
    """Look at the machine and the installation, and say what to do about each finding.

    Takes a few seconds and changes nothing. The exit status is 1 if something must be mended.
    """
    findings = collect_findings()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        _print(findings)
    if any(finding.is_problem for finding in findings):
        raise typer.Exit(1)


def collect_findings() -> list[Finding]:
    """Run all checks."""
    quiet()
    cores = usable_cores()
    kept = entries()
    return [
        _processor(cores),
        _kernels(),
        _threads(cores),
        *_memory(kept),
        _device(),
        *_versions(),
        _extras(),
        *_cache(kept),
    ]


def _print(findings: list[Finding]) -> None:
    """Print findings, a line each, with the advice below."""
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    width = 2 + max(len(finding.subject) for finding in findings)
    for finding in findings:
        style = "bold red" if finding.is_problem else "bold"
        console.print(Text.assemble((f"{finding.subject:{width}}", style), finding.text))
        if finding.advice:
            style = "red" if finding.is_problem else "yellow"
            console.print(Text(f"{'':{width}}-> {finding.advice}", style=style))
    problems = sum(finding.is_problem for finding in findings)
    console.print()
    if problems:
        console.print(Text(f"{problems} of these must be mended: see the lines with ->", "red"))
    else:
        console.print("forerun can run here.")


# The machine.


def _processor(cores: int) -> Finding:
    from forerun.backends.facts import processor

    return Finding("processor", f"{processor()}, {_count(cores, 'core')} for this process")


def _kernels() -> Finding:
    """Look at the C library, and at the instruction set that it uses."""
    subject = "kernels"
    try:
        functions = library()
    except ValueError as error:
        return Finding(subject, str(error), f"unset {VARIABLE}", is_problem=True)
    if functions is None:
        return Finding(subject, f"not in use: {missing()}", _kernel_advice(), is_problem=True)
    used = variant()
    best = variants()[-1]
    text = f"C for {used}"
    build = f"`{sys.executable} {HERE / 'build.py'}` builds them anew"
    origin = sources_id()
    if origin is not None and (build_id() or "").partition("-")[0] != origin:
        return Finding(subject, f"{text}, built from other sources", build)
    if used != best:
        return Finding(subject, text, f"unset {VARIABLE}: {best} is faster")
    if used == "plain":
        return Finding(
            subject,
            f"{text}: no instruction set that this processor has is used",
            "decoding is slow here: take smollm2, or a processor with AVX2 or NEON",
        )
    return Finding(subject, text)


def _kernel_advice() -> str:
    """Return how to get the C library into use."""
    if os.environ.get(VARIABLE) == "none":
        return f"unset {VARIABLE}"
    build = f"`{sys.executable} {HERE / 'build.py'}`"
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler.split()[0]) is None:
        return f"there is no C compiler {compiler!r}: install one, for example gcc; then {build}"
    return f"build them with {build}"


def _threads(cores: int) -> Finding:
    import torch

    threads = torch.get_num_threads()
    text = f"{threads}"
    variable = os.environ.get("OMP_NUM_THREADS")
    if variable is not None:
        text += f" (OMP_NUM_THREADS is {variable})"
    if threads > cores:
        advice = f"set OMP_NUM_THREADS={cores}, or give --threads {cores}: more threads than cores "
        return Finding("threads", text, f"{advice}slow each other down", is_problem=True)
    wanted = physical_cores() or cores  # as many as `quiet` takes without the variable
    if threads < wanted and variable is not None:
        advice = f"unset OMP_NUM_THREADS to use all {wanted} cores"
        return Finding("threads", text, advice)
    return Finding("threads", text)


def _memory(kept: list[Entry]) -> Iterator[Finding]:
    """Look at the free memory, and measure how fast it is read."""
    import torch

    from forerun.server.memory import free_memory

    free = free_memory(torch.device("cpu"))
    if free is None:
        yield Finding("memory", "unknown")
    else:
        yield _free_memory(free, kept)
    speed = read_speed(READ_BYTES if free is None else min(READ_BYTES, free // 8))
    size = MODELS[QWEN_CODER].size
    yield Finding(
        "memory speed",
        f"{speed / 1e9:.1f} GB/s; a token takes all weights, so plain decoding of {QWEN_CODER} "
        f"({shown_size(size)}) gives at most {speed / size:.0f} tokens/s",
    )


def _free_memory(free: int, kept: list[Entry]) -> Finding:
    """Judge the free memory by the largest model that is here."""
    text = f"{shown_size(free)} free"
    sizes = {entry.name: entry.bytes for entry in kept if entry.name in MODELS}
    if not sizes:
        return Finding("memory", text)
    largest = max(sizes, key=lambda name: sizes[name])
    needed = int(MEMORY_PER_FILE * sizes[largest]) + MEMORY_BESIDE
    if free >= needed:
        return Finding("memory", text)
    advice = f"{largest} needs about {shown_size(needed)}: close other programs"
    if largest != SMOLLM2:
        advice += f", or take --target {SMOLLM2}"
    return Finding("memory", text, advice, is_problem=True)


def read_speed(size: int) -> float:
    """Return how many bytes torch's threads read per second from an array of `size` bytes."""
    import torch

    array = torch.ones(max(1, size // 8), dtype=torch.int64)
    best = float("inf")
    for _ in range(READ_TIMES):
        started_at = perf_counter()
        array.sum()
        best = min(best, perf_counter() - started_at)
    return array.numel() * array.element_size() / best


def _device() -> Finding:
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        advice = "GGUF files and few bits have kernels for CPUs only: give --device cpu for these"
        return Finding("device", f"{name}, which forerun takes by default", advice)
    if torch.version.cuda is not None:
        advice = "PyTorch's build for CPUs takes some GB less"
        return Finding("device", "cpu; torch is a build for CUDA, and finds no GPU", advice)
    return Finding("device", "cpu")


# The installation.


def _versions() -> Iterator[Finding]:
    """Compare versions with those that forerun wants, and with those that it was tested with."""
    from forerun.model.compat import TESTED

    shown = ", ".join(f"{name} {version(name)}" for name in SHOWN_PACKAGES)
    yield Finding("versions", f"forerun {__version__}, Python {platform.python_version()}, {shown}")
    for wanted in unmet():
        yield Finding("versions", f"forerun wants {wanted}", f"pip install '{wanted}'", True)
    transformers = version("transformers")
    numbers = tuple(int(part) for part in transformers.split(".")[:2] if part.isdigit())
    if numbers > TESTED:
        tested = ".".join(map(str, TESTED))
        yield Finding(
            "versions",
            f"transformers {transformers} is newer than {tested}, with which forerun was tested",
            f"if something fails: pip install 'transformers=={tested}.*'",
        )


def unmet() -> list[str]:
    """Return the requirements of forerun that what is installed does not meet."""
    from packaging.requirements import Requirement  # transformers needs it too

    try:
        texts = requires("forerun") or []
    except PackageNotFoundError:  # a clone that was not installed
        return []
    failed = []
    for text in texts:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            is_met = requirement.specifier.contains(version(requirement.name), prereleases=True)
        except PackageNotFoundError:
            is_met = False
        if not is_met:
            failed.append(f"{requirement.name}{requirement.specifier}")
    return failed


def _extras() -> Finding:
    """Say which commands lack packages."""
    lacking = []
    for extra, modules in EXTRA_MODULES.items():
        if any(find_spec(module) is None for module in modules):
            lacking.append(extra)
    present = [extra for extra in EXTRA_MODULES if extra not in lacking]
    if not lacking:
        return Finding("extras", ", ".join(present))
    wanted = ",".join(lacking)
    return Finding(
        "extras",
        ", ".join(present) or "none",
        f"for {', '.join(lacking)}: pip install '.[{wanted}]' in the clone of forerun",
    )


# The cache folder.


def _cache(kept: list[Entry]) -> Iterator[Finding]:
    """Look at the folder of models, what it holds, and whether it can be written."""
    folder = home()
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    room = shutil.disk_usage(existing).free
    text = f"{folder}, {shown_size(sum(entry.bytes for entry in kept))}"
    text += f"; {shown_size(room)} free on the disk"
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        advice = "make it writable, or let FORERUN_HOME name another folder"
        yield Finding("cache", f"{text}; it cannot be written", advice, is_problem=True)
    else:
        yield Finding("cache", text)
    for entry in kept:
        yield Finding("", f"{entry.name}, {shown_size(entry.bytes)}: {entry.note}", entry.advice)
    if not any(find(name) is not None for name in (QWEN_CODER, SMOLLM2)):
        larger = shown_size(MODELS[QWEN_CODER].size)
        smaller = shown_size(MODELS[SMOLLM2].size)
        yield Finding(
            "",
            "no chat model is here, so the embedded pair is the default target",
            f"`forerun fetch {QWEN_CODER}` (a model of {larger} and its draft) or "
            f"`forerun fetch {SMOLLM2}` ({smaller})",
        )


def _count(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
