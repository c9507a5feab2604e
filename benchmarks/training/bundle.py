"""Puts trained parts into the package, in few bits, with their recipes and curves.

    python -m benchmarks.training.bundle RUN... [--target smollm2] [--bits 6] [--work WORK]

A RUN is the `--out` of `forerun train`: a draft, a head or a layer. WORK is its `--work`, if it had
one. Recipes stand in the README of each folder that this writes. The embedded pair's head is in 8
bits and has no curve (`--target embedded --bits 8`). It was made with

    forerun train lyanna --data stdlib --sequences 4096 --hot 1 --steps 6000 --work WORK --out FIRST
    forerun train lyanna --data stdlib --sequences 10240 --hot 1 --steps 2400 --lr 4e-3 \
        --work WORK --start FIRST --out HEAD
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
from forerun.zoo import EMBEDDED, FOLDERS, HOT_FILE, QWEN_CODER, SMOLLM2

CURVE = "curve.json"


def put(source: Path, target: str, bits: int, work: Path | None) -> Path:
    """Write the folder of a draft, head or layer, and return it."""
    config = json.loads((source / "config.json").read_text())
    if config["model_type"] == PreVerifierConfig.model_type:
        kind = Pacer.layer
    else:
        kind = config.get("kind", "draft")
    folder = FOLDERS[target] / kind
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "draft":
        # Without its tokenizer, which is the target's.
        save_quantised(load_model(source, "draft", plain=True), folder, {}, bits)
        shutil.copy(source / HOT_FILE, folder)
        shutil.copy(source / "README.md", folder)
    elif "states" in config:
        head = load_head(source, CausalLM(load_model(target, "target")))
        save_quantised(head, folder, {}, bits)
        shutil.copy(source / "README.md", folder)
    else:
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("work"))
    if target != EMBEDDED:
        put_curve(source, folder, work)
    return folder


def put_curve(source: Path, folder: Path, work: Path | None) -> None:
    """Write the curve beside a trained part, or the validation losses by step of its log.

    Raises:
        SystemExit: there is neither.
    """
    if (source / CURVE).exists():
        shutil.copy(source / CURVE, folder)
        return
    log = (work or source / "work") / "training" / source.name / "log.jsonl"
    if not log.exists():
        raise SystemExit(f"no log of the training of {source}: give --work")
    # A step that was done again has two lines, of which the later counts.
    records = {line["step"]: line for line in map(json.loads, log.read_text().splitlines())}
    losses = []
    for step, line in sorted(records.items()):
        if "validation" in line:
            losses.append([step, line["validation"]])
    write_text(folder / CURVE, json.dumps({source.name: losses}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--target", choices=(SMOLLM2, QWEN_CODER, EMBEDDED), default=SMOLLM2)
    parser.add_argument("--bits", type=int, choices=(6, 8), default=6)
    parser.add_argument(
        "--work", type=Path, help="where the runs kept their logs, if not beside them"
    )
    args = parser.parse_args()
    for run in args.runs:
        folder = put(run, args.target, args.bits, args.work)
        print(f"{folder.name}: {sum(path.stat().st_size for path in folder.iterdir()):,} bytes")


if __name__ == "__main__":
    main()
