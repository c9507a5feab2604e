"""The pre-verifier: a small layer that tells how far the target will follow a draft (Pacer, arXiv 2602.01274).

The paper has a light trainable layer verify draft tokens block by block before the target does. Its inputs, its form
and its training here are ours; docs/results/pacer.md has the ablations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from forerun.nn.echo import SIZES

INPUTS = ("confidence", "echoes", "history", "hidden", "token", "target")
CONFIDENCE, ECHOES, HISTORY = 3, 3 * len(SIZES), 3
COUNTED = 4.0  # echoes of a kind, at most
LEAST = 6e-6  # a token's probability, as it is told to the layer
TRACES = 512
USUAL = 4.0  # the length of a run of accepted tokens that was not seen


class PreVerifierConfig(PreTrainedConfig):
    """Settings of a pre-verifier.

    Attributes:
        draft_size, target_size: width of the two models' LM-head inputs; token_size that of the draft's embeddings.
        width, layers, heads: of the layer itself; 0 layers leave a perceptron with one hidden layer more.
        depth: places in a draft that are told apart; later ones count as the last.
        inputs: which of INPUTS it sees.
        kind: "survival": it says itself whether the target is still there at a token. "acceptance": whether the target
            takes a token if it took those before; survival is the product (SpecDec++, arXiv 2405.19715).
        draft, target: fingerprints of the models it belongs to (`forerun.model.fingerprint`).
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
        token_size: int = 64,
        target_size: int = 64,
        width: int = 32,
        layers: int = 0,
        heads: int = 4,
        depth: int = 32,
        inputs: Sequence[str] = ("confidence", "echoes", "history"),
        kind: str = "survival",
        draft: dict[str, Any] | None = None,
        target: dict[str, Any] | None = None,
        recipe: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.draft_size, self.token_size, self.target_size = draft_size, token_size, target_size
        self.width, self.layers, self.heads, self.depth = width, layers, heads, depth
        self.inputs, self.kind = list(inputs), kind
        self.draft, self.target, self.recipe = draft or {}, target or {}, recipe or {}
        super().__init__(**kwargs)


def chances_of(scores: Tensor, tokens: Tensor) -> Tensor:
    """[..] probabilities of tokens [..] under processed scores [.., V]."""
    return scores.softmax(-1).gather(-1, tokens[..., None])[..., 0]


class State(NamedTuple):
    """What a pre-verifier remembers of the beginnings of N drafts."""

    base: Tensor  # [N, width] what does not change along a draft
    places: int  # tokens so far
    log_q: Tensor  # [N] sum of their log-probabilities
    least: Tensor  # [N] the smallest of these
    counts: Tensor  # [N, 2, E] how many of them broke an echo, and how many had none to follow
    log_survival: Tensor  # [N] of the last of them; for the kind "acceptance"
    past: tuple[tuple[Tensor, Tensor], ...]  # keys and values [N, H, places, width / H] of each block

    def select(self, rows: Tensor) -> State:
        """Only these drafts."""
        past = tuple((keys[rows], values[rows]) for keys, values in self.past)
        running = self.log_q[rows], self.least[rows], self.counts[rows], self.log_survival[rows]
        return State(self.base[rows], self.places, *running, past)


class PreVerifier(PreTrainedModel):
    """u_i = W [norm(g_i); norm(e_i); confidence_i; echoes_i; norm(h); history] + P[i] for the i-th token of a draft,
    then pre-norm transformer blocks that are causal over this draft only, or without them a perceptron, then one number
    a token: whether the target will still be with the draft there.

    It carries what it said of some drafts that it has not learnt from, and beside it the products of the draft's own
    probabilities, `greedy_traces` and `drawn_traces` [2, TRACES, G] in 255ths: with a table of costs they tell where
    stopping pays, and whether the layer does.
    """

    config_class = PreVerifierConfig
    config: PreVerifierConfig

    def __init__(self, config: PreVerifierConfig) -> None:
        super().__init__(config)
        width, inputs = config.width, config.inputs
        sizes = {
            "hidden": config.draft_size,
            "token": config.token_size,
            "confidence": CONFIDENCE,
            "echoes": ECHOES,
            "target": config.target_size,
            "history": HISTORY,
        }
        self.enter = nn.ModuleDict({name: nn.Linear(sizes[name], width, bias=False) for name in inputs})
        self.place = nn.Parameter(torch.zeros(config.depth, width))
        self.blocks = nn.ModuleList([Block(width, config.heads) for _ in range(config.layers)])
        self.middle = None if config.layers else nn.Linear(width, width)
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

    def begin(self, target: Tensor | None, history: Tensor) -> State:
        """The state in front of N drafts.

        Args:
            target: [N, D] the target's LM-head input behind the last verified token, zeros where there is none yet;
                None where that is no input.
            history: [N, 3] lengths of the last runs of accepted tokens.
        """
        base = torch.zeros(len(history), self.config.width, device=history.device)
        if "history" in self.enter:
            base = base + self.enter["history"](history.float().log1p())
        if "target" in self.enter:
            assert target is not None
            base = base + self.enter["target"](normed(target))
        zeros = torch.zeros(len(history), device=history.device)
        return State(base, 0, zeros, zeros, zeros.new_zeros(len(zeros), 2, len(SIZES)), zeros, ())

    def step(
        self, state: State, log_q: Tensor, echoes: Tensor | None, hidden: Tensor | None, embedded: Tensor | None
    ) -> tuple[Tensor, Tensor, State]:
        """Goes on by b tokens of N drafts: logits [N, b], of survival or, by `config.kind`, of acceptance; the survival
        [N, b] that follows; and the new state.

        Args:
            log_q: [N, b] logs of `chances_of`, those of LEAST at the least.
            echoes: [N, b, E] of `forerun.nn.echo`.
            hidden: [N, b, d] the draft's LM-head inputs that gave the tokens.
            embedded: [N, b, e] the tokens' embeddings.
        """
        log_q = log_q.float()
        sums = log_q.cumsum(-1) + state.log_q[:, None]
        least = torch.minimum(log_q.cummin(-1).values, state.least[:, None])
        counts = state.counts
        new, last = log_q.shape[1], self.config.depth - 1
        places = [min(at, last) for at in range(state.places, state.places + new)]
        x = self.place[places] + state.base[:, None]
        if "confidence" in self.enter:
            x = x + self.enter["confidence"](torch.stack([log_q, sums.clamp(min=-20.0) / 2, least], -1))
        if "echoes" in self.enter:
            assert echoes is not None
            echoes = echoes.float()
            running = torch.stack([echoes < 0, echoes == 0], 2).float().cumsum(1) + counts[:, None]  # [N, b, 2, E]
            counts = running[:, -1]
            told = torch.cat([echoes[:, :, None], running.clamp(max=COUNTED)], 2)
            x = x + self.enter["echoes"](told.flatten(2))
        if "hidden" in self.enter:
            assert hidden is not None
            x = x + self.enter["hidden"](normed(hidden))
        if "token" in self.enter:
            assert embedded is not None
            x = x + self.enter["token"](normed(embedded))
        past = []
        for number, block in enumerate(self.blocks):
            x, kept = block(x, state.past[number] if state.past else None)
            past.append(kept)
        if self.middle is not None:
            x = functional.relu(self.middle(functional.relu(x)))
        logits = self.leave(x if self.middle is not None else normed(x))[..., 0]
        log_survival = functional.logsigmoid(logits)
        if self.config.kind == "acceptance":
            log_survival = log_survival.cumsum(-1) + state.log_survival[:, None]
        new_state = State(
            state.base, state.places + new, sums[:, -1], least[:, -1], counts, log_survival[:, -1], tuple(past)
        )
        return logits, log_survival.exp(), new_state


class Block(nn.Module):
    """One pre-norm transformer block without biases in its attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """[N, b, width] to the same, causal, behind tokens whose keys and values [N, H, n, width / H] are given; with
        the keys and values of all."""
        rows, new, width = x.shape
        qkv = self.qkv(normed(x)).view(rows, new, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mask = None
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            size = k.shape[2]
            mask = torch.ones(new, size, dtype=torch.bool, device=x.device).tril(size - new)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, new, width))
        return x + self.down(functional.relu(self.up(normed(x)))), (k, v)


def normed(x: Tensor) -> Tensor:
    """RMSNorm without a gain, in float32."""
    return functional.rms_norm(x.float(), x.shape[-1:])
