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
from forerun.engine.stats import Stats
from forerun.planning.cost_model import Costs

# With their colours.
PHASES = {"draft": "#2a9d8f", "policy": "#e9c46a", "verify": "#264653", "rest": "#adb5bd"}
COLUMNS = (
    "method",
    "tokens/s",
    "speedup",
    "10-90 %",
    "decoding",
    "tau",
    "alpha",
    "utilisation",
    "overhead",
    "same tokens",
)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the 10th percentile, the median and the 90th percentile."""
    low, middle, high = np.percentile(list(values), [10, 50, 90]).tolist()
    return low, middle, high


def summary(records: Sequence[Record], one_by_one: Collection[str] = ()) -> dict[str, Any]:
    """Return statistics of each method, from records of one dataset or of several.

    A speedup is a ratio to `ar` on the same prompts in the same round. `one_by_one` are the methods
    whose rows ran one after the other.
    """
    by_method: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.group):
        by_method.setdefault(record.method, []).append(record)
    plain = {record.group: record for record in by_method["ar"]}
    return {
        name: _method(some, plain) | {"rows_one_by_one": name in one_by_one}
        for name, some in by_method.items()
    }


def _method(records: Sequence[Record], plain: dict[Group, Record]) -> dict[str, Any]:
    """Return the statistics of one method; `plain` are the records of `ar`."""
    rate = median(record.stats.tokens_per_s for record in records)
    low, middle, high = spread(
        [record.stats.tokens_per_s / plain[record.group].stats.tokens_per_s for record in records]
    )
    stats = total([record.stats for record in records])
    equal = [is_equal for record in records for is_equal in record.equal or []]
    return {
        "tokens_per_s": round(rate, 2),
        "speedup": round(middle, 4),
        "speedup_p10": round(low, 4),
        "speedup_p90": round(high, 4),
        **_decoding(records, plain),
        "tau": round(stats.tau, 4),
        **_drafting(records, stats),
        "tokens": stats.tokens,
        "seconds": round(stats.seconds, 4),
        "target_forwards": stats.target_forwards,
        "draft_forwards": stats.draft_forwards,
        **_time(records, stats),
        "exact_match": round(sum(equal) / len(equal), 4) if equal else None,
    }


def _decoding(records: Sequence[Record], plain: dict[Group, Record]) -> dict[str, float | None]:
    """Return the median tokens/s without reading prompts, and the median ratio to `ar`'s."""
    rates = []
    ratios = []
    for record in records:
        rate = record.decoding_tokens_per_s
        if rate:
            rates.append(rate)
            plain_rate = plain[record.group].decoding_tokens_per_s
            if plain_rate:
                ratios.append(rate / plain_rate)
    return {
        "decoding_tokens_per_s": round(median(rates), 2) if rates else None,
        "decoding_speedup": round(median(ratios), 4) if ratios else None,
    }


def _drafting(records: Sequence[Record], stats: Stats) -> dict[str, Any]:
    """Return the statistics of drafts.

    Of the drafts of transformers only the forwards are known, so they have none.
    """
    is_known = any(record.times is not None for record in records) and stats.tested > 0
    if not is_known:
        return {"alpha": None, "utilisation": None, "acceptance_by_position": None}
    return {
        "alpha": round(stats.alpha, 4),
        "utilisation": round(stats.utilisation, 4),
        "acceptance_by_position": [round(share, 4) for share in stats.acceptance_by_position],
    }


def _time(records: Sequence[Record], stats: Stats) -> dict[str, Any]:
    """Return where the time went, of methods that keep steps."""
    times = [record.times for record in records if record.times is not None]
    if not times:
        return {"time": None, "prompt_share": None, "overhead_share": None}
    step_seconds = sum(batch.seconds for batch in times)
    return {
        "time": _shares(times),
        "prompt_share": round(1 - step_seconds / stats.seconds, 4),
        "overhead_share": round(median(batch.overhead_share for batch in times), 4),
    }


def _shares(times: Sequence[Times]) -> dict[str, float]:
    """Return each phase's share of step time.

    It is the median over batches, so that one preemption does not decide it, scaled so that the
    shares sum to 1.
    """
    medians = {phase: _median_share(times, phase) for phase in PHASES}
    return {phase: round(share / sum(medians.values()), 4) for phase, share in medians.items()}


def _median_share(times: Sequence[Times], phase: str) -> float:
    return median(getattr(batch, phase) / batch.seconds for batch in times)


def results(
    plan: Plan,
    prompts: dict[str, dict[str, Any]],
    records: Sequence[Record],
    costs: Costs | None = None,
) -> dict[str, Any]:
    """Return the content of results.json."""
    one_by_one: set[str] = set()
    if plan.batch > 1:
        one_by_one = {
            name
            for name, method in plan.methods.items()
            if isinstance(method, Runner) and method.one_by_one
        }
    datasets = {}
    for name, facts in prompts.items():
        some = [record for record in records if record.dataset == name]
        datasets[name] = facts | {"methods": summary(some, one_by_one)}
    methods = summary(records, one_by_one)
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
    """Return titles and methods of the tables.

    There is one table per dataset, and one of all datasets if there are several.
    """
    tables = []
    for name, dataset in results["datasets"].items():
        cut = f", {dataset['cut']} cut to the context" if dataset["cut"] else ""
        tables.append((f"{name} ({dataset['prompts']} prompts{cut})", dataset["methods"]))
    if len(tables) > 1:
        tables.append(("all datasets", results["methods"]))
    return tables


def provenance(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what every file of results holds.

    It says what was asked for, with which software and on which machine it was measured, and when.
    """
    return {
        "arguments": arguments,
        "versions": versions(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    }


def _tuned(plan: Plan, methods: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the best value of the setting that was tuned."""
    assert plan.tune is not None
    name, _, key = plan.tune.partition("=")[0].partition(".")
    tuned = [variant for variant in methods if variant != "ar"]
    best = max(tuned, key=lambda variant: methods[variant]["speedup"])
    return {name: {key: getattr(plan.methods[best], key)}}


def versions() -> dict[str, Any]:
    """Return the software and the machine that measure."""
    import torch

    from forerun.backends.facts import processor

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "forerun": __version__,
        "commit": _commit(),
    }
    # Transformers' assistant adapts its confidence threshold if scikit-learn is installed.
    for package in ("torch", "transformers", "scikit-learn"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = None
    return facts | {
        "kernels": kernels.variant(),
        "build": kernels.build_id(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _commit() -> str | None:
    """Return the commit of this source tree, or None if there is none.

    A + says that the package has been changed since. Changes outside the package do not count,
    because results and pages are written while runs go on. A repository that merely encloses an
    installed package does not track this file.
    """
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parents[1]), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", str(here))
        commit = git("rev-parse", "--short=12", "HEAD")
        changes = git("status", "--porcelain", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}+" if changes else commit
