"""The pre-verifier: a small layer that predicts how much of a draft the target will accept.

It is the idea of Pacer (arXiv 2602.01274): a light trainable layer verifies draft tokens block by
block before the target does. Its inputs, form and training here are ours;
docs/lab/2026-11/pacer.md has the ablations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from forerun.heads.echo import SIZES

INPUTS = {"confidence": 3, "echoes": 3 * len(SIZES), "history": 3}  # with the size of each
# Settings that older versions could choose, with the only values that are still supported.
RETIRED_LAYER_SETTINGS: dict[str, Any] = {"inputs": [*INPUTS], "kind": "survival", "layers": 0}
MAX_ECHO_COUNT = 4.0  # larger counts of echoes are cut to this
MIN_PROBABILITY = 6e-6  # smaller probabilities are raised to this
TRACES = 512
USUAL_RUN = 4.0  # stands for the length of a run of accepted tokens where no run is known yet


class PreVerifierConfig(PreTrainedConfig):
    """Settings of a pre-verifier.

    Attributes:
        width: width of the layer.
        depth: number of places with a bias of their own; later places use the last one's.
        draft: fingerprint of the draft that it belongs to (`forerun.model.causal_lm.fingerprint`).
        target: fingerprint of the target that it belongs to.
        recipe: how it was trained.

    Raises:
        ValueError: the layer has other inputs, outputs or blocks, which older versions could train.
    """

    model_type = "forerun-pre-verifier"
    if TYPE_CHECKING:  # some versions of transformers turn annotations into fields
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
        for name, supported in RETIRED_LAYER_SETTINGS.items():
            given = kwargs.pop(name, supported)
            if given != supported:
                raise ValueError(f"its {name} {given!r} is no longer supported: train it again")
        self.width = width
        self.depth = depth
        self.draft = draft or {}
        self.target = target or {}
        self.recipe = recipe or {}
        super().__init__(**kwargs)


class PreVerifier(PreTrainedModel):
    """A perceptron with two hidden layers that gives one logit for each token of a draft.

    For the i-th token the first hidden layer is u_i = W [history; confidence_i; echoes_i] + P[i].

    This is the form for training. Decoding runs `forerun.heads.quick`, token by token.

    Attributes:
        greedy_traces: [2, TRACES, G], in 255ths: survival on greedy validation drafts, first as the
            layer predicts it, then as products of the draft's own probabilities. With a table of
            costs the traces show where stopping pays, and whether the layer pays.
        drawn_traces: the same on sampled validation drafts.
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
        for name in ("greedy_traces", "drawn_traces"):
            traces = torch.zeros(2, TRACES, config.depth, dtype=torch.uint8)
            self.register_buffer(name, traces)
        PreTrainedModel.post_init(self)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, history: Tensor, log_q: Tensor, echoes: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [N, G] of survival for N whole drafts, and survival itself.

        Survival is the probability that a token and all tokens before it are accepted.

        Args:
            history: [N, 3] lengths of the last runs of accepted tokens.
            log_q: [N, G] log-probabilities of the tokens, at least log(MIN_PROBABILITY).
            echoes: [N, G, E] (`forerun.heads.echo`).
        """
        log_q = log_q.float()
        sums = log_q.cumsum(-1).clamp(min=-20.0) / 2
        lowest = log_q.cummin(-1).values
        echoes = echoes.float()[:, :, None]
        kinds = torch.cat([echoes < 0, echoes == 0], 2)
        counts = kinds.float().cumsum(1).clamp(max=MAX_ECHO_COUNT)
        features = {
            "confidence": torch.stack([log_q, sums, lowest], -1),
            "echoes": torch.cat([echoes, counts], 2).flatten(2),
            "history": history.float().log1p()[:, None],
        }
        last = self.config.depth - 1
        places = [min(at, last) for at in range(log_q.shape[1])]
        x = self.place[places].expand(len(log_q), -1, -1)
        for name, value in features.items():
            x = x + self.enter[name](value)
        logits = self.leave(torch.relu(self.middle(torch.relu(x))))[..., 0]
        return logits, logits.sigmoid()
