"""The embedded target with twice its layers, of which the new ones add nothing, and its heads.

    python -m benchmarks.training.deepen OUT HEAD_FOLDER ...

It says what the embedded target says, and costs what a target of that depth costs: a head's layer
is 1/32 of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.training.pair import deepen
from forerun.api.layers import load_head
from forerun.api.loading import load_model, load_tokenizer
from forerun.model.causal_lm import CausalLM
from forerun.zoo import EMBEDDED


def main(out: Path, heads: list[str]) -> None:
    target = load_model(EMBEDDED, "target")
    deep = deepen(target)
    deep.generation_config = target.generation_config
    deep.save_pretrained(out / "target")
    load_tokenizer(EMBEDDED).save_pretrained(out / "target")
    for folder in heads:
        head = load_head(folder, CausalLM(target))
        head.config.target = CausalLM(deep).fingerprint
        head.save_pretrained(out / head.config.kind)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
