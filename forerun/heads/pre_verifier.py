"""The pre-verifier: a small layer that predicts how far the target will follow a draft (Pacer, arXiv 2602.01274).

The paper has a light trainable layer verify draft tokens block by block before the target does. Its inputs, its form
and its training here are ours; docs/results/pacer.md has the ablations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from forerun.heads.echo import SIZES

INPUTS = ("confidence", "echoes", "history", "hidden", "entropy", "top")
CONFIDENCE, ECHOES, HISTORY = 3, 3 * len(SIZES), 3
UNKNOWN = (0.0, 0.0)  # entropy and top probability before the target's first distribution, which has neither
COUNTED = 4.0  # echoes of a kind, at most
LEAST = 6e-6  # the smallest probability among the inputs
TRACES = 512
USUAL = 4.0  # the length of a run of accepted tokens that was not seen


class PreVerifierConfig(PreTrainedConfig):
    """Settings of a pre-verifier.

    Attributes:
        draft_size: width of the draft's LM-head inputs.
        width: of the layer itself.
        layers: transformer blocks of older layers, which are refused.
        depth: places in a draft that differ; later ones count as the last.
        inputs: names of INPUTS.
        kind: of output. "survival": the probability that a token and all before it are accepted. "acceptance": that a
            token is accepted if those before it were; survival is the product (SpecDec++, arXiv 2405.19715).
        draft, target: fingerprints of the models it belongs to (`forerun.model.causal_lm.fingerprint`).
        recipe: how it was trained.
    """

    model_type = "forerun-pre-verifier"
    if TYPE_CHECKING:  # annotations of a configuration are fields to some versions of transformers
        inputs: list[str]
        kind: str
        draft: dict[str, Any]
        target: dict[str, Any]
        recipe: dict[str, Any]

    def __init__(
        self,
        draft_size: int = 64,
        width: int = 32,
        layers: int = 0,
        depth: int = 32,
        inputs: Sequence[str] = ("confidence", "echoes", "history"),
        kind: str = "survival",
        draft: dict[str, Any] | None = None,
        target: dict[str, Any] | None = None,
        recipe: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.draft_size, self.width, self.layers, self.depth = draft_size, width, layers, depth
        self.inputs, self.kind = list(inputs), kind
        self.draft, self.target, self.recipe = draft or {}, target or {}, recipe or {}
        super().__init__(**kwargs)


class PreVerifier(PreTrainedModel):
    """u_i = W [history; log(1 + entropy); top; confidence_i; echoes_i; norm(g_i)] + P[i] for the i-th token of a draft,
    then a perceptron with a hidden layer, then one logit a token.

    This is the form for training; decoding runs `forerun.heads.quick`, token by token.

    The layer carries its output on some validation drafts, and the products of the draft's own probabilities:
    `greedy_traces` and, of sampled drafts, `drawn_traces` [2, TRACES, G] in 255ths. With a table of costs they show
    where stopping pays, and whether the layer does.
    """

    config_class = PreVerifierConfig
    config: PreVerifierConfig

    def __init__(self, config: PreVerifierConfig) -> None:
        super().__init__(config)
        if config.layers:
            raise ValueError("a pre-verifier has no transformer blocks any more: train it again, without layers")
        sizes = {"history": HISTORY, "entropy": 1, "top": 1, "confidence": CONFIDENCE, "echoes": ECHOES}
        sizes["hidden"], width = config.draft_size, config.width
        for name in config.inputs:
            if name not in INPUTS:
                raise ValueError(f"a pre-verifier's inputs are of {', '.join(INPUTS)}, not {name!r}: train it again")
        self.enter = nn.ModuleDict({name: nn.Linear(sizes[name], width, bias=False) for name in config.inputs})
        self.place = nn.Parameter(torch.zeros(config.depth, width))
        self.middle = nn.Linear(width, width)
        self.leave = nn.Linear(width, 1)
        self.greedy_traces: Tensor
        self.drawn_traces: Tensor
        self.register_buffer("greedy_traces", torch.zeros(2, TRACES, config.depth, dtype=torch.uint8))
        self.register_buffer("drawn_traces", torch.zeros(2, TRACES, config.depth, dtype=torch.uint8))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(
        self,
        history: Tensor,
        log_q: Tensor,
        echoes: Tensor | None = None,
        hidden: Tensor | None = None,
        law: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits [N, G] of N whole drafts, of survival or, by `config.kind`, of acceptance; and the survival
        [N, G] that follows. Only tensors of the layer's inputs are needed.

        Args:
            history: [N, 3] lengths of the last runs of accepted tokens.
            log_q: [N, G] logs of the tokens' probabilities, of LEAST at the least.
            echoes: [N, G, E] of `forerun.heads.echo`.
            hidden: [N, G, d] the draft's LM-head inputs that gave the tokens.
            law: [N, 2] of `law_of`, for the target's scores that the last verified token was chosen from; UNKNOWN
                before the first ones.
        """
        log_q, last = log_q.float(), self.config.depth - 1
        features = {"history": history.float().log1p()[:, None]}
        if law is not None:
            features |= {"entropy": law[:, None, :1].float().log1p(), "top": law[:, None, 1:].float()}
        sums, least = log_q.cumsum(-1).clamp(min=-20.0) / 2, log_q.cummin(-1).values
        features["confidence"] = torch.stack([log_q, sums, least], -1)
        if echoes is not None:
            echoes = echoes.float()[:, :, None]
            counts = torch.cat([echoes < 0, echoes == 0], 2).float().cumsum(1).clamp(max=COUNTED)
            features["echoes"] = torch.cat([echoes, counts], 2).flatten(2)
        if hidden is not None:
            features["hidden"] = functional.rms_norm(hidden.float(), hidden.shape[-1:])
        x = self.place[[min(at, last) for at in range(log_q.shape[1])]].expand(len(log_q), -1, -1)
        for name, value in features.items():
            if name in self.enter:
                x = x + self.enter[name](value)
        logits = self.leave(functional.relu(self.middle(functional.relu(x))))[..., 0]
        log_survival = functional.logsigmoid(logits)
        if self.config.kind == "acceptance":
            log_survival = log_survival.cumsum(-1)
        return logits, log_survival.exp()


def law_of(scores: Tensor) -> Tensor:
    """Return [.., 2] of the softmax of scores [.., V]: its entropy in nats, and its largest probability.

    The scores are processed ones: a sampled request's tokens are sampled from this distribution. A greedy one's is that
    of the logits.
    """
    logs = scores.float().log_softmax(-1)
    top = logs.amax(-1).exp()
    logs = logs.clamp_(min=-80.0)  # what is less probable adds nothing; -inf times 0 would be NaN
    return torch.stack([torch.linalg.vecdot(logs.exp(), -logs), top], -1)
