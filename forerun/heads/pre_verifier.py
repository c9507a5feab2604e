"""The pre-verifier: a small layer that predicts how much of a draft the target will accept (Pacer, arXiv 2602.01274).

In the paper a light trainable layer verifies draft tokens block by block before the target does. Its inputs, form and
training here are ours; docs/results/pacer.md has the ablations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from forerun.heads.echo import SIZES

INPUTS = {"confidence": 3, "echoes": 3 * len(SIZES), "history": 3}  # and their sizes
OLDER: dict[str, Any] = {
    "inputs": [*INPUTS],
    "kind": "survival",
    "layers": 0,
}  # what older files may choose, and did
COUNTED = 4.0  # limit of the counts of echoes
LEAST = 6e-6  # smaller probabilities are raised to this
TRACES = 512
USUAL = 4.0  # stands for the length of a run of accepted tokens before the first


class PreVerifierConfig(PreTrainedConfig):
    """Settings of a pre-verifier.

    Attributes:
        width: of the layer.
        depth: places with their own bias; later places use the last.
        draft, target: fingerprints of the models it belongs to (`forerun.model.causal_lm.fingerprint`).
        recipe: how it was trained.

    Raises ValueError for layers with other inputs, outputs or blocks, which older versions could train.
    """

    model_type = "forerun-pre-verifier"
    if TYPE_CHECKING:  # some versions of transformers take annotations for fields
        draft: dict[str, Any]
        target: dict[str, Any]
        recipe: dict[str, Any]

    def __init__(
        self,
        width: int = 32,
        depth: int = 32,
        draft: dict[str, Any] | None = None,
        target: dict[str, Any] | None = None,
        recipe: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        for name, value in OLDER.items():
            if (given := kwargs.pop(name, value)) != value:
                raise ValueError(f"its {name} {given!r} is no longer supported: train it again")
        self.width, self.depth = width, depth
        self.draft, self.target, self.recipe = draft or {}, target or {}, recipe or {}
        super().__init__(**kwargs)


class PreVerifier(PreTrainedModel):
    """A perceptron with two hidden layers and one logit for each token of a draft. The first, for the i-th token, is
    u_i = W [history; confidence_i; echoes_i] + P[i].

    This is the form for training. Decoding runs `forerun.heads.quick`, token by token.

    The buffers `greedy_traces` and `drawn_traces` [2, TRACES, G], in 255ths, hold survival on greedy and on sampled
    validation drafts: by the layer, and by products of the draft's own probabilities. With a table of costs they show
    where stopping pays, and whether the layer does.
    """

    config_class = PreVerifierConfig
    config: PreVerifierConfig

    def __init__(self, config: PreVerifierConfig) -> None:
        super().__init__(config)
        width = config.width
        self.enter = nn.ModuleDict(
            {name: nn.Linear(size, width, bias=False) for name, size in INPUTS.items()}
        )
        self.place = nn.Parameter(torch.zeros(config.depth, width))
        self.middle = nn.Linear(width, width)
        self.leave = nn.Linear(width, 1)
        self.greedy_traces: Tensor
        self.drawn_traces: Tensor
        self.register_buffer(
            "greedy_traces", torch.zeros(2, TRACES, config.depth, dtype=torch.uint8)
        )
        self.register_buffer(
            "drawn_traces", torch.zeros(2, TRACES, config.depth, dtype=torch.uint8)
        )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, history: Tensor, log_q: Tensor, echoes: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of survival [N, G] for N whole drafts, and survival: the probability that a token and all
        before it are accepted.

        Args:
            history: [N, 3] lengths of the last runs of accepted tokens.
            log_q: [N, G] log-probabilities of the tokens, at least log(LEAST).
            echoes: [N, G, E] (`forerun.heads.echo`).
        """
        log_q, last = log_q.float(), self.config.depth - 1
        sums, least = log_q.cumsum(-1).clamp(min=-20.0) / 2, log_q.cummin(-1).values
        echoes = echoes.float()[:, :, None]
        counts = torch.cat([echoes < 0, echoes == 0], 2).float().cumsum(1).clamp(max=COUNTED)
        features = {
            "confidence": torch.stack([log_q, sums, least], -1),
            "echoes": torch.cat([echoes, counts], 2).flatten(2),
            "history": history.float().log1p()[:, None],
        }
        x = self.place[[min(at, last) for at in range(log_q.shape[1])]].expand(len(log_q), -1, -1)
        for name, value in features.items():
            x = x + self.enter[name](value)
        logits = self.leave(torch.relu(self.middle(torch.relu(x))))[..., 0]
        return logits, logits.sigmoid()
