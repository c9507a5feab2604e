"""Puts a trained head into the package, in 8 bits: python -m benchmarks.lyanna.bundle HEAD

Made with
forerun train lyanna --data stdlib --sequences 4096 --hot 1 --steps 6000 --work WORK --out FIRST
forerun train lyanna --data stdlib --sequences 10240 --hot 1 --steps 2400 --lr 4e-3 --work WORK --start FIRST --out HEAD
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from benchmarks.embedded.quantise import save_quantised
from forerun.api.layers import load_head
from forerun.api.loading import load_model
from forerun.model.causal_lm import CausalLM
from forerun.zoo import EMBEDDED, WEIGHTS_FOLDER


def main(source: Path) -> None:
    head = load_head(source, CausalLM(load_model(EMBEDDED, "target")))
    folder = WEIGHTS_FOLDER / head.config.kind
    save_quantised(head, folder, {})
    shutil.copy(source / "README.md", folder)
    print(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir()):,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
