"""The pre-verifier: a small layer that predicts how much of a draft the target will accept (Pacer, arXiv 2602.01274).

In the paper a light trainable layer verifies draft tokens block by block before the target does. Its inputs, form and
training here are ours; docs/results/pacer.md has the ablations.
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
UNKNOWN = (0.0, 0.0)  # stands for entropy and top probability before the target's first distribution
COUNTED = 4.0  # limit of the counts of echoes
LEAST = 6e-6  # smaller probabilities are raised to this
TRACES = 512
USUAL = 4.0  # stands for the length of a run of accepted tokens before the first


class PreVerifierConfig(PreTrainedConfig):
    """Settings of a pre-verifier.

    Attributes:
        draft_size: width of the draft's LM-head inputs.
        width: of the layer itself.
        layers: transformer blocks of an old form, which is refused unless 0.
        depth: places with their own bias; later places use the last.
        inputs: names of INPUTS.
        kind: of output. "survival": the probability that a token and all before it are accepted. "acceptance": the
            probability of a token if those before it are accepted; survival is the product (SpecDec++, arXiv
            2405.19715).
        draft, target: fingerprints of the models it belongs to (`forerun.model.causal_lm.fingerprint`).
        recipe: how it was trained.
    """

    model_type = "forerun-pre-verifier"
    if TYPE_CHECKING:  # some versions of transformers take annotations for fields
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
    """A perceptron with two hidden layers and one logit for each token of a draft. The first, for the i-th token, is
    u_i = W [history; log(1 + entropy); top; confidence_i; echoes_i; norm(g_i)] + P[i].

    This is the form for training. Decoding runs `forerun.heads.quick`, token by token.

    The buffers `greedy_traces` and `drawn_traces` [2, TRACES, G], in 255ths, hold survival on greedy and on sampled
    validation drafts: by the layer, and by products of the draft's own probabilities. With a table of costs they show
    where stopping pays, and whether the layer does.
    """

    config_class = PreVerifierConfig
    config: PreVerifierConfig

    def __init__(self, config: PreVerifierConfig) -> None:
        super().__init__(config)
        if config.layers:
            raise ValueError("a pre-verifier's transformer blocks are not supported any more: train it without layers")
        sizes = {"history": HISTORY, "entropy": 1, "top": 1, "confidence": CONFIDENCE, "echoes": ECHOES}
        sizes["hidden"], width = config.draft_size, config.width
        for name in config.inputs:
            if name not in INPUTS:
                raise ValueError(f"a pre-verifier's inputs are among {', '.join(INPUTS)}, not {name!r}: train it again")
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
        certainty: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits [N, G] for N whole drafts, of survival or of acceptance (`config.kind`), and the survival [N,
        G]. Inputs that the layer does not use may be None.

        Args:
            history: [N, 3] lengths of the last runs of accepted tokens.
            log_q: [N, G] log-probabilities of the tokens, at least log(LEAST).
            echoes: [N, G, E] (`forerun.heads.echo`).
            hidden: [N, G, d] the draft's LM-head inputs that gave the tokens.
            certainty: [N, 2] `certainty_of` the target's scores that gave the last verified token; UNKNOWN before any.
        """
        log_q, last = log_q.float(), self.config.depth - 1
        features = {"history": history.float().log1p()[:, None]}
        if certainty is not None:
            features |= {"entropy": certainty[:, None, :1].float().log1p(), "top": certainty[:, None, 1:].float()}
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


def certainty_of(scores: Tensor) -> Tensor:
    """Return the entropy in nats and the largest probability [.., 2] of the softmax of scores [.., V].

    The scores are processed ones, so for a sampled request this is the distribution that its tokens are sampled from.
    """
    logs = scores.float().log_softmax(-1)
    top = logs.amax(-1).exp()
    logs = logs.clamp_(min=-80.0)  # rarer tokens add nothing, and -inf times 0 would be NaN
    return torch.stack([torch.linalg.vecdot(logs.exp(), -logs), top], -1)
