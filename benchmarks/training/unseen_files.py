"""Files of the standard library that the embedded pair has not seen, to train its pre-verifier.

    python benchmarks/training/unseen_files.py SPARE
    forerun train pre-verifier --data SPARE --out LAYER

They are the validation files that give none of the first 40 held-out prompts, because settings are
chosen on these prompts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from forerun.api.loading import load_tokenizer
from forerun.train.corpus import file_prompts, source_files
from forerun.zoo import EMBEDDED

PROMPTS = 40
PROMPT_TOKENS = 128


def main(out: Path) -> None:
    prompts = file_prompts(load_tokenizer(EMBEDDED), "validation", PROMPT_TOKENS)[:PROMPTS]
    taken = {relative for _, relative, _ in prompts}
    for relative, text in source_files("validation"):
        if relative not in taken:
            path = out / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
