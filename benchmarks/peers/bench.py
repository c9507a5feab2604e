"""`forerun bench` with others beside our methods, in the same run: transformers' own generate, and llama.cpp.

    python -m benchmarks.peers.bench --methods ar,sd,hf-ar,hf-assisted,llama-cpp --out RUN ...

Takes the options of `forerun bench` and the names of `benchmarks.peers.runners`; --out also gets a report and pictures.
"""

from __future__ import annotations

import json
from functools import wraps
from typing import Any

from benchmarks.command import run
from benchmarks.peers.llama import PACKAGE as LLAMA_PACKAGE
from benchmarks.peers.runners import ASSISTED, Peers, checked, expanded, is_llama
from forerun.cli.bench import bench, measured, planned, show, split
from forerun.files import write_text


@wraps(bench)
def main(**given: Any) -> None:
    plan, files = planned(given | {"methods": expanded(split(given["methods"]))}, Peers())
    out = given["out"]
    results = with_best(measured(checked(plan), files, out, given["resume"]))
    if any(map(is_llama, plan.methods)):
        results["versions"]["node-llama-cpp"] = json.loads(LLAMA_PACKAGE.read_text())["version"]
    if out is not None:
        from benchmarks.speed.report import write_report

        write_text(out / "results.json", json.dumps(results, indent=1) + "\n")
        write_report(out)
    if given["as_json"]:
        print(json.dumps(results))
    else:
        show(results, out)


def with_best(results: dict[str, Any]) -> dict[str, Any]:
    """The results with a row `hf-assisted`, where there are several settings of it: whichever of them has the best
    median tokens/s in these very records."""
    for each in (results, *results["datasets"].values()):
        methods = each["methods"]
        settings = [name for name in methods if name.startswith(f"{ASSISTED}/")]
        if len(settings) > 1:
            best = max(settings, key=lambda name: methods[name]["tokens_per_s"])
            methods[ASSISTED] = methods[best] | {"schedule": best.partition("/")[2]}
    return results


if __name__ == "__main__":
    run(main)
