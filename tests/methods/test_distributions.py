"""Sampled output follows the target's distribution.

Of methods with trained layers and heads, with and without logits processors.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from forerun import Decoder
from forerun.backends.heads import HiddenLM
from forerun.methods import method
from forerun.model.causal_lm import CausalLM
from tests.support.eagle3_heads import random_eagle3
from tests.support.toys import joint_distribution, noisy_copy, p_value, parts_of, tiny

VOCAB = 6
ROWS = 350  # so many that a residual that lacks the draft's distribution is seen by each
JOINT = 3
PROMPT = [1, 2, 3, 2, 1, 2]
FITS = 1e-4
METHOD_SETTINGS = {
    "sd": {"gamma": 3},
    "pacer": {"most": 3},
    "pacer-ouroboros": {"guesses": 2, "ngram": 3, "suffixes": 1, "most": 3},
    "lyanna": {"depth": 3, "width": 2, "nodes": 5},
    "lyanna alone": {"depth": 3, "reuse": "off"},
    "lyanna from old states": {"depth": 3, "reuse": "free", "least": 1},
    "lyanna with branches": {"depth": 3, "reuse": "both"},
    "lyanna with trees of branches": {"depth": 3, "width": 2, "nodes": 5, "reuse": "both"},
    "pacer-lyanna": {"depth": 3, "nodes": 4, "block": 2},
    "pacer-lyanna with trees from old states": {
        "depth": 3,
        "width": 2,
        "nodes": 5,
        "reuse": "free",
        "least": 1,
    },
    "eagle chain": {"depth": 3},
    "eagle": {"depth": 3, "width": 2, "nodes": 5},
    "pacer-eagle": {"depth": 3, "nodes": 4},
    "eagle3 chain": {"depth": 3},
    "eagle3": {"depth": 3, "width": 2, "nodes": 5},
}
CONFIGS = {
    "top-p": {"temperature": 1.3, "top_p": 0.85},
    "top-p and penalty": {"temperature": 1.2, "top_p": 0.85, "repetition_penalty": 1.6},
    "penalty": {"temperature": 1.2, "repetition_penalty": 1.6},
}
# Where no token is cut off, mistakes are seen later. So these have twice as many rows.
UNCUT = ("sd", "pacer-lyanna", "eagle", "eagle3")
CASES = [
    *product(METHOD_SETTINGS, ("top-p", "top-p and penalty")),
    *product(UNCUT, ("penalty",)),
]


@cache
def target() -> PreTrainedModel:
    return tiny("llama", vocab=VOCAB)


@cache
def joint(config: str) -> Tensor:
    """The exact distribution [V] * JOINT of the first tokens.

    It is computed by transformers' forwards and processors.
    """
    settings = GenerationConfig(do_sample=True, max_new_tokens=JOINT, top_k=0, **CONFIGS[config])
    return joint_distribution(
        target(), PROMPT, JOINT, CausalLM(target()).processors(settings, len(PROMPT))
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config"), CASES)
def test_sampled_tokens_follow_the_targets_distribution(name: str, config: str) -> None:
    settings = METHOD_SETTINGS[name]
    rows = 2 * ROWS if config == "penalty" else ROWS
    name = name.partition(" ")[0]
    model = target()
    draft = noisy_copy(target(), 0.05)
    parts = parts_of(name, model, draft, hot=5)
    if name == "eagle3":
        parts["head"] = HiddenLM(
            random_eagle3(CausalLM(model), draft_vocab_size=5), CausalLM(model)
        )
    chosen = method(name.removesuffix("3"), **settings)
    # To find a prefix among hundreds of texts takes as long as to decode them, so few are kept, and
    # by one of the two configurations none.
    few = {"max_rows": 120, "prefix_bytes": 2**14 if config == "top-p" else 0}
    decoder = Decoder(model, None, draft, chosen, False, **few, **parts)
    decoder.engine.limits.chunk_seconds = 100.0  # no clock says who joins when
    torch.manual_seed(
        5
    )  # with a seed of its own a sequence would be sampled the same, whatever is drafted
    answers = decoder.generate(
        [PROMPT] * rows, max_new_tokens=JOINT + 1, ignore_eos=True, **CONFIGS[config]
    )
    assert p_value([row.tokens[:JOINT] for row in answers], joint(config)) > FITS
    # The machinery was at work: drafts were tested, and some were accepted and some not.
    tested, accepted = (
        sum(getattr(row.stats, each) for row in answers) for each in ("tested", "accepted")
    )
    assert 0 < accepted < tested
