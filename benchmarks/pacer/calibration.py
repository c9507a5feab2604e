"""How well the pre-verifier of the embedded pair tells survival on the 40 test prompts: AUC and ECE, drafts from every
place of the target's own output."""

from __future__ import annotations

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

NEW = 128


def drafts_of(
    target: CausalLM, draft: CausalLM, windows: torch.Tensor, depth: int, sampler: Sampler
) -> list[Drafts]:
    generator = torch.Generator().manual_seed(0)
    texts = [of_windows(rows.numpy(), windows.shape[1] - NEW - 1) for rows in windows.split(4)]
    return [roll_out(target, draft, each, None, depth, sampler, generator) for each in texts]


def main() -> None:
    target, draft = (CausalLM(load_model(EMBEDDED, part)) for part in ("target", "draft"))
    layer: PreVerifier = load_pre_verifier(WEIGHTS_FOLDER / "pre-verifier", target, draft)
    prompts = held_out_prompts(load_tokenizer(EMBEDDED), "test", 40, 128)
    config = GenerationConfig(do_sample=True, temperature=TEMPERATURE, top_p=WINDOW_TOP_P, top_k=0)
    sampler = Sampler(False, target.processors(config, 128))
    decoder = Decoder(target.model, method=AR())
    for name, depth, options in (
        ("greedy", 20, {}),
        ("sampling", 10, {"temperature": TEMPERATURE, "top_p": WINDOW_TOP_P, "seed": 0}),
    ):
        done = decoder.generate(prompts, max_new_tokens=NEW, ignore_eos=True, **options)
        windows = torch.tensor(
            [prompt + each.tokens for prompt, each in zip(prompts, done, strict=True)]
        )
        parts = drafts_of(target, draft, windows, depth, sampler if options else Sampler())
        drafts = {each: torch.cat([part[each] for part in parts]) for each in FIELDS}
        found = measure(layer, drafts)
        print(f"{name}: AUC {found['auc']}, ECE {found['ece']}, {found['drafts']} drafts")


if __name__ == "__main__":
    main()
