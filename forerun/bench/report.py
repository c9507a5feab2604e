"""Statistics of a run's records, and where they were measured."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from forerun import __version__
from forerun.bench.plan import Plan, Runner
from forerun.bench.records import Group, Record, Times, total
from forerun.csrc import library as kernels
from forerun.planning.cost_model import Costs

PHASES = {
    "draft": "#2a9d8f",
    "policy": "#e9c46a",
    "verify": "#264653",
    "rest": "#adb5bd",
}  # and colours
COLUMNS = (
    *(
        "method",
        "tokens/s",
        "speedup",
        "10-90 %",
        "decoding",
        "tau",
        "alpha",
        "utilisation",
        "overhead",
    ),
    "same tokens",
)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the 10th percentile, the median and the 90th percentile."""
    low, middle, high = np.percentile(list(values), [10, 50, 90]).tolist()
    return low, middle, high


def summary(records: Sequence[Record], one_by_one: Collection[str] = ()) -> dict[str, Any]:
    """Return statistics of each method, from records of one dataset or of several.

    A speedup is a ratio to `ar` on the same prompts in the same round. `one_by_one`: methods whose rows ran one after
    the other.
    """
    own: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda each: each.group):
        own.setdefault(record.method, []).append(record)
    plain = {record.group: record for record in own["ar"]}
    return {
        name: _method(each, plain) | {"rows_one_by_one": name in one_by_one}
        for name, each in own.items()
    }


def _method(own: Sequence[Record], plain: dict[Group, Record]) -> dict[str, Any]:
    rate = median(record.stats.tokens_per_s for record in own)
    ratios = spread(
        [record.stats.tokens_per_s / plain[record.group].stats.tokens_per_s for record in own]
    )
    stats = total([record.stats for record in own])
    spent = [record.times for record in own if record.times is not None]
    drafting = (
        spent and stats.tested > 0
    )  # nothing is known of transformers' drafts but the forwards
    equal = [each for record in own for each in record.equal or []]
    return {
        "tokens_per_s": round(rate, 2),
        "speedup": round(ratios[1], 4),
        "speedup_p10": round(ratios[0], 4),
        "speedup_p90": round(ratios[2], 4),
        **_decoding(own, plain),
        "tau": round(stats.tau, 4),
        "alpha": round(stats.alpha, 4) if drafting else None,
        "utilisation": round(stats.utilisation, 4) if drafting else None,
        "acceptance_by_position": [round(share, 4) for share in stats.acceptance_by_position]
        if drafting
        else None,
        "tokens": stats.tokens,
        "seconds": round(stats.seconds, 4),
        "target_forwards": stats.target_forwards,
        "draft_forwards": stats.draft_forwards,
        "time": _shares(spent) if spent else None,
        "prompt_share": round(1 - sum(each.seconds for each in spent) / stats.seconds, 4)
        if spent
        else None,
        "overhead_share": round(median(each.overhead_share for each in spent), 4)
        if spent
        else None,
        "exact_match": round(sum(equal) / len(equal), 4) if equal else None,
    }


def _decoding(own: Sequence[Record], plain: dict[Group, Record]) -> dict[str, float | None]:
    """Return the median tokens/s without reading prompts, and the median ratio to `ar`'s."""
    rates = [
        (record.decoding_tokens_per_s, plain[record.group].decoding_tokens_per_s)
        for record in own
        if record.decoding_tokens_per_s
    ]
    ratios = [rate / of_plain for rate, of_plain in rates if of_plain]
    return {
        "decoding_tokens_per_s": round(median(rate for rate, _ in rates), 2) if rates else None,
        "decoding_speedup": round(median(ratios), 4) if ratios else None,
    }


def _shares(spent: Sequence[Times]) -> dict[str, float]:
    """Return each phase's median share of step time, which one preemption does not set. Together they are 1."""
    middle = {
        phase: median(getattr(each, phase) / each.seconds for each in spent) for phase in PHASES
    }
    return {phase: round(share / sum(middle.values()), 4) for phase, share in middle.items()}


def results(
    plan: Plan,
    prompts: dict[str, dict[str, Any]],
    records: Sequence[Record],
    costs: Costs | None = None,
) -> dict[str, Any]:
    """Return what results.json holds."""
    slow = {
        name for name, each in plan.methods.items() if isinstance(each, Runner) and each.one_by_one
    }
    slow = slow if plan.batch > 1 else set()
    datasets = {
        name: prompts[name]
        | {"methods": summary([each for each in records if each.dataset == name], slow)}
        for name in prompts
    }
    methods = summary(records, slow)
    return {
        "methods": methods,
        "datasets": datasets,
        **({"tuned": _tuned(plan, methods)} if plan.tune else {}),
        "reference": plan.reference if not plan.temperature else None,
        "costs": asdict(costs) if costs is not None else None,
        **provenance(plan.arguments()),
    }


def row(name: str, method: dict[str, Any]) -> list[str]:
    """Return one method's line of a table, in the order of COLUMNS."""
    return [
        name,
        f"{method['tokens_per_s']:.1f}",
        f"{method['speedup']:.2f}",
        f"{method['speedup_p10']:.2f}-{method['speedup_p90']:.2f}",
        f"{method['decoding_speedup']:.2f}" if method.get("decoding_speedup") else "",
        f"{method['tau']:.2f}",
        *(
            "" if method[key] is None else f"{method[key]:.2f}"
            for key in ("alpha", "utilisation", "overhead_share")
        ),
        "" if method["exact_match"] is None else f"{100 * method['exact_match']:.4g} %",
    ]


def sections(results: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return titles and methods of the tables: one a dataset, and one of all if there are several."""
    sections = []
    for name, dataset in results["datasets"].items():
        cut = f", {dataset['cut']} cut to the context" if dataset["cut"] else ""
        sections.append((f"{name} ({dataset['prompts']} prompts{cut})", dataset["methods"]))
    return sections + ([("all datasets", results["methods"])] if len(sections) > 1 else [])


def provenance(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what every file of results holds: what was asked for, with and on what it was measured, and when."""
    return {
        "arguments": arguments,
        "versions": versions(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    }


def _tuned(plan: Plan, methods: dict[str, Any]) -> dict[str, dict[str, Any]]:
    assert plan.tune is not None
    name, _, key = plan.tune.partition("=")[0].partition(".")
    best = max(
        (each for each in methods if each != "ar"), key=lambda each: methods[each]["speedup"]
    )
    return {name: {key: getattr(plan.methods[best], key)}}


def versions() -> dict[str, Any]:
    """Return what was measured with, and on."""
    import torch

    from forerun.backends.facts import processor

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "forerun": __version__,
        "commit": _commit(),
    }
    # With scikit-learn transformers' assistant adapts its confidence threshold.
    for package in ("torch", "transformers", "scikit-learn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    found |= {"kernels": kernels.variant(), "build": kernels.build_id()}
    return found | {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def _commit() -> str | None:
    """Return the commit of this source tree, with a + if the package has been changed since; None if there is none.

    Changes outside the package do not count: results and pages are written while runs go on. A repository that merely
    encloses an installed package does not track this file.
    """
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parents[1]), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", str(here))
        return git("rev-parse", "--short=12", "HEAD") + (
            "+" if git("status", "--porcelain", "--", ".") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return None
