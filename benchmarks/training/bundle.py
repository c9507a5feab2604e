"""Puts what was trained for smollm2 or qwen-coder into the package, in few bits, with its recipe and its curve.

    python -m benchmarks.training.bundle RUN... [--target smollm2] [--bits 6] [--work WORK]

A RUN is the `--out` of `forerun train`, WORK its `--work`, where it had one. Recipes stand in the README of each folder
that this writes.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from benchmarks.training.quantise import save_quantised
from forerun.api.layers import load_head
from forerun.api.loading import load_model
from forerun.files import write_text
from forerun.heads.pre_verifier import PreVerifierConfig
from forerun.methods import Pacer
from forerun.model.causal_lm import CausalLM
from forerun.zoo import FOLDERS, HOT_FILE, QWEN_CODER, SMOLLM2

CURVE = "curve.json"


def put(source: Path, target: str, bits: int, work: Path | None) -> Path:
    """Writes the folder of a draft, head or layer; returns it."""
    config = json.loads((source / "config.json").read_text())
    kind = (
        Pacer.layer
        if config["model_type"] == PreVerifierConfig.model_type
        else config.get("kind", "draft")
    )
    folder = FOLDERS[target] / kind
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "draft":
        # Without its tokenizer, which is the target's.
        save_quantised(load_model(source, "draft", plain=True), folder, {}, bits)
        shutil.copy(source / HOT_FILE, folder)
        shutil.copy(source / "README.md", folder)
    elif "states" in config:
        save_quantised(load_head(source, CausalLM(load_model(target, "target"))), folder, {}, bits)
        shutil.copy(source / "README.md", folder)
    else:
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("work"))
    curve(source, folder, work)
    return folder


def curve(source: Path, folder: Path, work: Path | None) -> None:
    """Writes the curve that stands beside what was trained, or the validation losses by step of its log."""
    if (source / CURVE).exists():
        shutil.copy(source / CURVE, folder)
        return
    log = (work or source / "work") / "training" / source.name / "log.jsonl"
    if not log.exists():
        raise SystemExit(f"no log of the training of {source}: give --work")
    records = {
        each["step"]: each for each in map(json.loads, log.read_text().splitlines())
    }  # the later, if done again
    kept = [
        [step, each["validation"]] for step, each in sorted(records.items()) if "validation" in each
    ]
    write_text(folder / CURVE, json.dumps({source.name: kept}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--target", choices=(SMOLLM2, QWEN_CODER), default=SMOLLM2)
    parser.add_argument("--bits", type=int, choices=(6, 8), default=6)
    parser.add_argument(
        "--work", type=Path, help="where the runs kept their logs, if not beside them"
    )
    given = parser.parse_args()
    for run in given.runs:
        folder = put(run, given.target, given.bits, given.work)
        print(f"{folder.name}: {sum(path.stat().st_size for path in folder.iterdir()):,} bytes")


if __name__ == "__main__":
    main()
