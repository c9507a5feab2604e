"""`forerun bench` with other programs beside our methods, in the same run.

    python -m benchmarks.peers.bench --methods ar,sd,hf-ar,hf-assisted,llama-cpp --out RUN ...

The other programs are transformers' own `generate` and llama.cpp, by the names of
`benchmarks.peers.runners`. All options are those of `forerun bench`; --out also gets a report and
pictures.
"""

from __future__ import annotations

import json
from functools import wraps
from typing import Any

from benchmarks.command import run
from benchmarks.peers.llama import llama_version
from benchmarks.peers.runners import ASSISTED, Peers, checked, expanded, is_llama
from forerun.cli.bench import bench, measured, planned, show, split
from forerun.files import write_text


@wraps(bench)
def main(**given: Any) -> None:
    methods = expanded(split(given["methods"]))
    plan, files = planned(given | {"methods": methods}, Peers())
    out = given["out"]
    results = with_best(measured(checked(plan), files, out, given["resume"]))
    if any(map(is_llama, plan.methods)):
        results["versions"]["node-llama-cpp"] = llama_version()
    if out is not None:
        from benchmarks.speed.report import write_report

        write_text(out / "results.json", json.dumps(results, indent=1) + "\n")
        write_report(out)
    if given["as_json"]:
        print(json.dumps(results))
    else:
        show(results, out)


def with_best(results: dict[str, Any]) -> dict[str, Any]:
    """Return the results with a row `hf-assisted`, if several settings of it ran.

    The row is that of the setting with the best median tokens/s in these very records, which
    favours transformers.
    """
    for part in (results, *results["datasets"].values()):
        methods = part["methods"]
        settings = [name for name in methods if name.startswith(f"{ASSISTED}/")]
        if len(settings) > 1:
            best = max(settings, key=lambda name: methods[name]["tokens_per_s"])
            methods[ASSISTED] = methods[best] | {"schedule": best.partition("/")[2]}
    return results


if __name__ == "__main__":
    run(main)
