"""Files of the standard library that the embedded pair has not seen, to train its pre-verifier on:
python benchmarks/training/unseen_files.py SPARE
forerun train pre-verifier --data SPARE --out LAYER

They are the validation files that give none of the first 40 held-out prompts, on which settings are chosen.
"""

from __future__ import annotations

import sys
from pathlib import Path

from forerun.api.loading import load_tokenizer
from forerun.train.corpus import file_prompts, source_files
from forerun.zoo import EMBEDDED


def main(out: Path) -> None:
    taken = {
        relative
        for _, relative, _ in file_prompts(load_tokenizer(EMBEDDED), "validation", 128)[:40]
    }
    for relative, text in source_files("validation"):
        if relative not in taken:
            path = out / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
