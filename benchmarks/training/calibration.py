"""How well the embedded pair's pre-verifier predicts survival on the 40 test prompts: AUC and ECE.

    python benchmarks/training/calibration.py

The drafts begin at every place of the target's own output.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig

from forerun.api.layers import load_pre_verifier
from forerun.api.load import Decoder
from forerun.api.loading import load_model, load_tokenizer
from forerun.heads.pre_verifier import PreVerifier
from forerun.methods import AR
from forerun.model.causal_lm import CausalLM
from forerun.sampling.sampler import Sampler
from forerun.train.corpus import held_out_prompts
from forerun.train.pre_verifier import TEMPERATURE, WINDOW_TOP_P, measure
from forerun.train.rollout import FIELDS, Drafts, roll_out
from forerun.train.texts import of_windows
from forerun.zoo import EMBEDDED, WEIGHTS_FOLDER

PROMPTS = 40
TOKENS = 128  # of a prompt, and of an output
BATCH = 4  # texts that are drafted together
SAMPLED = {"temperature": TEMPERATURE, "top_p": WINDOW_TOP_P, "seed": 0}
# The depth of drafts and how tokens are chosen.
WAYS: dict[str, tuple[int, dict[str, Any]]] = {"greedy": (20, {}), "sampling": (10, SAMPLED)}


def drafts_of(
    target: CausalLM, draft: CausalLM, windows: torch.Tensor, depth: int, sampler: Sampler
) -> dict[str, torch.Tensor]:
    """Return drafts from every place of the outputs at the ends of windows."""
    generator = torch.Generator().manual_seed(0)
    parts: list[Drafts] = []
    for rows in windows.split(BATCH):
        texts = of_windows(rows.numpy(), windows.shape[1] - TOKENS - 1)
        parts.append(roll_out(target, draft, texts, None, depth, sampler, generator))
    drafts = {}
    for name in FIELDS:
        drafts[name] = torch.cat([part[name] for part in parts])
    return drafts


def main() -> None:
    target = CausalLM(load_model(EMBEDDED, "target"))
    draft = CausalLM(load_model(EMBEDDED, "draft"))
    layer: PreVerifier = load_pre_verifier(WEIGHTS_FOLDER / "pre-verifier", target, draft)
    prompts = held_out_prompts(load_tokenizer(EMBEDDED), "test", PROMPTS, TOKENS)
    config = GenerationConfig(do_sample=True, temperature=TEMPERATURE, top_p=WINDOW_TOP_P, top_k=0)
    sampler = Sampler(False, target.processors(config, TOKENS))
    decoder = Decoder(target.model, method=AR())
    for name, (depth, options) in WAYS.items():
        outputs = decoder.generate(prompts, max_new_tokens=TOKENS, ignore_eos=True, **options)
        texts = [prompt + one.tokens for prompt, one in zip(prompts, outputs, strict=True)]
        rule = sampler if options else Sampler()
        drafts = drafts_of(target, draft, torch.tensor(texts), depth, rule)
        quality = measure(layer, drafts)
        print(f"{name}: AUC {quality['auc']}, ECE {quality['ece']}, {quality['drafts']} drafts")


if __name__ == "__main__":
    main()
