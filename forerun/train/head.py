"""Heads that draft from the target's hidden states, trained on the target's own output."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig

from forerun.api.layers import load_head
from forerun.backends import prepare
from forerun.backends.family import FAMILY
from forerun.backends.heads import head_rows
from forerun.backends.hot import hot_tokens
from forerun.backends.panels import BLOCK_INPUTS
from forerun.backends.stored import StoredLinear, is_stored
from forerun.heads.eagle3 import Eagle3Head
from forerun.heads.heads import KINDS, HeadLayer, HiddenConfig, HiddenDrafter, hot_set
from forerun.model.causal_lm import CausalLM, context_of
from forerun.train.labels import Labels, cross_entropy, in_parts, label
from forerun.train.loop import TrainConfig, mixed_precision, product_dtype, save_card, train
from forerun.train.run import Run, check_context
from forerun.train.texts import load_train_val, split_windows
from forerun.zoo import hot_folder, own_draft

SEED = 9000  # of the output; no draft is distilled with it
EVALUATED = 128  # texts, while a head is trained
LONGEST = 65536  # context of a head whose target names none
HOT = 16384
LARGEST = 31_000_000  # parameters, which take 24 MB in 6 bits


@dataclass(frozen=True)
class HeadRecipe:
    """How a head is made."""

    sequences: int = (
        2048  # windows of the target's own output, half of them greedy; all seeds use the same
    )
    prompt: int = 64  # tokens of text in a window
    output: int = 192  # tokens of output in a window
    steps: int = 2000
    batch: int = 8  # texts
    lr: float = 6e-3
    unroll: int = 4  # how many states ahead are trained, each from the head's own state before
    held: float = 0.04  # share of the windows kept for validation
    seed: int = 0
    kind: str = "lyanna"  # one of KINDS
    layers: int = 1
    rank: int = 64  # of the token information; 0 trains a head without it
    hot: float | None = (
        None  # the hot set's share of the vocabulary; by default a quarter, at most HOT tokens
    )
    inner: int | None = (
        None  # neurons of its MLP; by default the target's, as many as LARGEST allows
    )
    copied: bool = True  # begin with the target's last layer
    linear: int = 150  # steps before `steps` that train a copied head without its layers, whose output is 0 then

    def check(self) -> None:
        """Raise ValueError for a setting out of range."""
        for name, is_right, allowed in (
            ("kind", self.kind in KINDS, f"one of {', '.join(KINDS)}"),
            ("rank", self.rank >= 0, "at least 0"),
            ("hot", self.hot is None or 0 < self.hot <= 1, "above 0 and at most 1"),
            ("inner", self.inner is None or self.inner > 0, "at least 1"),
            ("held", 0 < self.held <= 0.5, "above 0 and at most 0.5"),
            (
                "unroll",
                1 <= self.unroll < self.output,
                f"1 to {self.output - 1}, less than the output",
            ),
        ):
            if not is_right:
                raise ValueError(f"{name} must be {allowed}, not {asdict(self)[name]!r}")


def train_head(run: Run, recipe: HeadRecipe, start: Path | None = None) -> dict[str, Any]:
    """Train a head and save it in `run.out`; return the figures of validation.

    `start` is the folder of a head of the same form to go on from. It keeps its hot set. Raises ValueError for
    settings, data, models and folders that do not fit.
    """
    recipe.check()
    if start is not None and start.resolve() == run.out.resolve():
        raise ValueError(f"start and out are one folder, {str(run.out)!r}: give another out")
    _, stream = run.prompts(4 * recipe.prompt)
    parts = None if run.chats is None else load_train_val(run.chats)
    model = run.load(run.target, "target", frozen=True)
    check_context(model.config, parts, recipe.prompt + recipe.output, "target")
    target = prepare(model) if is_stored(model) else CausalLM(model.requires_grad_(False))
    embed: Any = model.get_input_embeddings()
    size = cast(Any, target.head).in_features
    if embed.embedding_dim != size:
        raise ValueError(
            f"the target's embeddings and its LM head are of other widths; its head reads {size}"
        )
    config = _config(model.config.get_text_config(decoder=True), size, recipe)
    config.target, config.recipe = target.fingerprint, asdict(recipe) | run.provenance
    torch.manual_seed(recipe.seed)
    drafter = HiddenDrafter(config)
    drafter.begin()
    own: dict[str, Any] = {"texts": parts and parts[0].digest}
    if start is not None:
        own["start"] = _continue(drafter, start, target)
    run.claim(
        {"target": target.fingerprint, "prompt": recipe.prompt, "output": recipe.output},
        asdict(recipe) | own,
    )
    if parts is None:
        length = recipe.prompt + recipe.output
        how: dict[str, Any] = {
            "prompts": [recipe.prompt],
            "length": length,
            "temperatures": (0.0, 1.0),
            "seed": SEED,
        }
        windows = np.concatenate(run.own_output(target, stream, sequences=recipe.sequences, **how))
        parts = split_windows(
            windows, recipe.held, 0, recipe.prompt
        )  # prompts count in training alone
    texts, val = parts
    if start is None:
        output = (
            texts
            if stream is None
            else replace(texts, begins=torch.full_like(texts.begins, recipe.prompt))
        )
        drafter.hot.copy_(_hot(run.target, output.frequencies(target.vocab_size), config.hot_size))
    wanted = val.frequencies(target.vocab_size)
    coverage = float(wanted[drafter.hot].sum() / wanted.sum())
    nn.Module.to(drafter, model.device)
    labels, val_labels = (label(run, target, each, states=True) for each in (texts, val))
    head = head_rows(target, drafter.hot, size)
    lm: Any = target.model
    is_copyable = type(lm).__name__ in FAMILY and "q_norm" not in dict(
        lm.model.layers[-1].self_attn.named_children()
    )
    is_copied = start is None and recipe.copied and is_copyable
    is_new = not (run.folder / "checkpoint.pt").exists()  # a checkpoint has what these would find
    if is_copied and is_new:
        initialise(drafter, target, labels, embed)

    def loss(rows: Tensor) -> Tensor:
        return head_loss(drafter, head, labels, rows, embed, recipe.unroll)

    def evaluate() -> float:
        asked = val.spread(EVALUATED).split(recipe.batch)
        losses = [
            head_loss(drafter, head, val_labels, rows, embed, recipe.unroll) for rows in asked
        ]
        with mixed_precision(model.device):
            survival, _ = measure(drafter, head, val_labels, embed, recipe.unroll)
        run.say(f"acceptance: a greedy chain's first 1, 2, ... tokens {survival}")
        return float(torch.stack(losses).mean())

    every: dict[str, Any] = {"evaluate_every": 250, "tokens": recipe.batch * texts.mean_length}
    every["known"] = is_copied or start is not None
    settings = TrainConfig(recipe.steps, recipe.lr, warmup=50, cooldown=0.5, **every)
    batch = partial(texts.batch, recipe.seed, size=recipe.batch)
    if is_copied and recipe.linear and is_new:
        layers, drafter.layers = drafter.layers, nn.ModuleList()
        first = replace(settings, steps=recipe.linear, warmup=5, evaluate_every=50)
        train(drafter, loss, batch, evaluate, first, run.folder / "linear", run.say)
        drafter.layers = layers
    train(drafter, loss, batch, evaluate, settings, run.folder, run.say)
    survival, drafter.config.curves = measure(drafter, head, val_labels, embed, recipe.unroll)
    found: dict[str, Any] = {"survival": survival, "coverage": round(coverage, 4)}
    found["parameters"] = sum(parameter.numel() for parameter in drafter.parameters())
    drafter.config.recipe["validation"] = found
    drafter.save_pretrained(run.out)
    shares = ", ".join(f"{share:.3f}" for share in survival)
    text = f"""It drafts from the hidden states of `{run.target}` and fits no other model: a fingerprint in
config.json is compared when it is loaded.

{found["parameters"]:,} parameters. On held-out output its greedy chains are the target's own in their
first 1, 2, ... tokens in these shares: {shares}. Its hot set covers {coverage:.2%} of it."""
    save_card(
        run.out, f"A head of the kind {recipe.kind} for speculative decoding", text, config.recipe
    )
    run.say(
        f"the hot set covers {coverage:.2%} of held-out output; survival of a greedy chain {survival}"
    )
    way = f"--target {run.target} --method {recipe.kind} --head {run.out}"
    run.say(f"the head is in {run.out}: forerun generate {way}")
    return found


def _config(text: PreTrainedConfig, size: int, recipe: HeadRecipe) -> HiddenConfig:
    """Return the configuration of a head for a target.

    Both kinds are of one size: lyanna has the factors of a table, eagle has a wider MLP instead.
    """
    heads, head_dim = (
        text.num_attention_heads,
        getattr(text, "head_dim", None) or size // text.num_attention_heads,
    )
    groups = getattr(text, "num_key_value_heads", None) or heads
    hot = max(
        1,
        min(HOT, text.vocab_size // 4)
        if recipe.hot is None
        else round(recipe.hot * text.vocab_size),
    )
    inner = own = getattr(text, "intermediate_size", None) or 4 * size
    table = recipe.rank * (text.vocab_size + hot)
    if recipe.inner is None:
        left = (
            LARGEST - table - 2 * size**2 - recipe.layers * 2 * size * head_dim * (heads + groups)
        )
        inner = min(
            own, max(BLOCK_INPUTS, left // (3 * size * recipe.layers * BLOCK_INPUTS) * BLOCK_INPUTS)
        )
    inner = recipe.inner or inner
    if recipe.kind == "eagle":
        inner += table // (3 * size * recipe.layers)
        if (
            inner >= 20 * BLOCK_INPUTS
        ):  # whole blocks, which our product in 8 bits needs, where they are a small part
            inner = round(inner / BLOCK_INPUTS) * BLOCK_INPUTS
    rope = getattr(text, "rope_parameters", None) or {}
    return HiddenConfig(
        kind=recipe.kind,
        hidden_size=size,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        bias=text.model_type == "qwen2",
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        num_hidden_layers=recipe.layers,
        states=recipe.unroll,
        rank=recipe.rank,
        vocab_size=text.vocab_size,
        hot_size=hot,
        max_position_embeddings=context_of(text) or LONGEST,
    )


def _hot(target: str, counts: Tensor, size: int) -> Tensor:
    """Return the hot set [S]: the first of the tokens that are named for the target's own draft, if these are enough,
    else the most frequent ones."""
    draft = own_draft(target)
    folder = None if draft is None else hot_folder(draft)
    known = hot_tokens(folder if isinstance(folder, Path) else None, None, len(counts))
    return known[:size] if known is not None and len(known) >= size else hot_set(counts, size)[0]


@torch.no_grad()
def initialise(drafter: HiddenDrafter, target: CausalLM, labels: Labels, embed: nn.Module) -> None:
    """Begin a head as the target's last layer, whose output does not count yet, after the linear map from features and
    tokens to the next feature that least squares find. So the first drafts are those of this map.

    Of the MLP's neurons those with the largest weights are kept. Token information begins with the principal components
    of the target's embeddings.
    """
    model: Any = target.model
    layer, own, size = (
        model.model.layers[-1],
        cast(HeadLayer, drafter.layers[-1]),
        drafter.config.hidden_size,
    )
    attention, inner = layer.self_attn, drafter.config.intermediate_size
    linears = [getattr(attention, f"{name}_proj") for name in "qkv"]
    own.qkv.weight.copy_(torch.cat([_weight(linear) for linear in linears]))
    if own.qkv.bias is not None:
        own.qkv.bias.copy_(torch.cat([linear.bias for linear in linears]))
    gate, up, down = (
        _weight(getattr(layer.mlp, f"{name}_proj")) for name in ("gate", "up", "down")
    )
    kept = (
        (gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)).topk(min(inner, len(gate))).indices
    )
    own.gate_up.weight[: len(kept)] = gate[kept]
    own.gate_up.weight[inner : inner + len(kept)] = up[kept]
    own.before_attention.weight.copy_(layer.input_layernorm.weight)
    own.before_mlp.weight.copy_(layer.post_attention_layernorm.weight)
    gain = model.model.norm.weight.float().clamp(min=0.1)
    drafter.norm.weight.copy_(gain)
    both, wanted = (
        torch.zeros(2 * size, width, device=target.device) for width in (2 * size, size)
    )
    for rows in labels.texts.spread(512).split(8):
        part, features = labels.texts.take(rows), labels.states(rows)
        after = functional.rms_norm(embed(part.tokens).float(), (size,)).roll(-1, 1)
        seen = (
            torch.arange(features.shape[1], device=target.device)
            < labels.texts.ends[rows][:, None] - 1
        )
        x, y = torch.cat([features, after], -1)[seen], (features.roll(-1, 1) / gain)[seen]
        both += x.T @ x
        wanted += x.T @ y
    both.diagonal().add_(3e-3 * both.diagonal().mean())
    drafter.fuse.weight.copy_(torch.linalg.solve(both, wanted).T)
    if drafter.informed and drafter.config.rank <= size:
        known = embed(drafter.hot).float()
        axes = torch.linalg.eigh(known.T @ known).eigenvectors[:, -drafter.config.rank :]
        for tokens in torch.arange(drafter.config.vocab_size, device=target.device).split(8192):
            drafter.embed.weight[tokens] = functional.rms_norm(
                embed(tokens).float() @ axes, (drafter.config.rank,)
            )


def _weight(linear: Any) -> Tensor:
    return linear.stored.floats() if isinstance(linear, StoredLinear) else linear.weight


def _continue(drafter: HiddenDrafter, start: Path, target: CausalLM) -> str:
    """Give a new head the weights of a trained one; return their hash, as the folder may hold another head later.

    Raises ValueError for a head of another form or target.
    """
    first = load_head(start, target, drafter.config.kind)
    if isinstance(first, Eagle3Head):
        raise ValueError(
            f"the head {str(start)!r} is of another form: an EAGLE-3 head cannot be trained here"
        )
    try:
        drafter.load_state_dict(first.state_dict())
    except RuntimeError:
        raise ValueError(
            f"the head {str(start)!r} is of another form; give it the same layers, rank and hot"
        ) from None
    recipe = first.config.recipe
    drafter.config.recipe["start"] = {
        name: value for name, value in recipe.items() if name != "validation"
    }
    return hashlib.sha256(
        b"".join(path.read_bytes() for path in sorted(start.glob("*.safetensors")))
    ).hexdigest()


def head_logits(
    drafter: HiddenDrafter, head: tuple[Tensor, Tensor], states: Tensor, after: Tensor
) -> Tensor:
    """Return logits [n, S] of drafted states [n, d] that follow tokens [n]."""
    logits = functional.linear(states.to(head[0].dtype), *head).float()
    return logits + drafter.token_information(after) if drafter.informed else logits


def head_loss(
    drafter: HiddenDrafter,
    head: tuple[Tensor, Tensor],
    labels: Labels,
    rows: Tensor,
    embed: nn.Module,
    unroll: int,
) -> Tensor:
    """Return the mean cross-entropy with the target's distributions over all steps of drafts from some texts.

    `head`: the result of `head_rows` for the hot set. It goes backward inside, as `in_parts` does.
    """
    weight, bias = head
    dtype = product_dtype(weight.device.type)
    low = weight.to(dtype), bias.to(dtype)  # once, and not for each product
    part, features = labels.texts.take(rows), labels.states(rows)
    length, counted = part.tokens.shape[1], part.counted().flatten()
    wanted = labels.probs(rows).within(drafter.hot, drafter.config.vocab_size)
    number = counted.cumsum(0) - 1  # of a position among those that count

    def loss(after: Tensor, positions: Tensor, states: Tensor, chosen: slice) -> Tensor:
        """Return the sum over states that stand for positions, after tokens."""
        logits = head_logits(drafter, low, states, after[chosen])
        return cross_entropy(logits, wanted.at(number[positions[chosen]]))

    total = features.new_zeros(())
    with mixed_precision(features.device):  # in bfloat16 a third of the time, and no worse a head
        for k, drafted in enumerate(
            drafter.drafted(features, embed(part.tokens).float(), unroll), 1
        ):
            text, at = part.counted(k).nonzero(as_tuple=True)
            own = partial(loss, part.tokens[text, at + k], text * length + at + k)
            total = total + in_parts(drafted[text, at], own, unroll * max(1, len(at)))
    return total


@torch.no_grad()
def measure(
    drafter: HiddenDrafter,
    head: tuple[Tensor, Tensor],
    labels: Labels,
    embed: nn.Module,
    unroll: int,
) -> tuple[list[float], list[list[float]]]:
    """Return figures of greedy chains from every position of the output: for each k the share of chains whose first k
    tokens are the target's argmax, and the curves of `HiddenConfig`.

    The tokens in between are those of the text. A chain ends where one of them is not the target's argmax: the share is
    the product of the shares among those that go on.
    """
    cases: list[list[Tensor]] = [[] for _ in range(unroll)]
    weight, bias = head
    whole = weight.float(), bias.float()
    for rows in labels.texts.ends.cpu().argsort(stable=True).split(16):
        part = labels.texts.take(rows)
        argmax = torch.full_like(part.tokens, -1)
        argmax[part.counted()] = labels.probs(rows).tokens[:, 0]
        kept = argmax == part.tokens.roll(-1, 1)  # where the text goes on with the target's argmax
        seen, length = part.counted(unroll), part.tokens.shape[1] - unroll
        drafts = drafter.drafted(labels.states(rows), embed(part.tokens).float(), unroll)
        for k, states in enumerate(drafts, 1):
            text, at = seen.nonzero(as_tuple=True)
            logits = head_logits(drafter, whole, states[text, at], part.tokens[text, at + k])
            log_prob, best = logits.log_softmax(-1).max(-1)
            hit = drafter.hot[best] == argmax[text, at + k]
            odds = log_prob - torch.log1p(-log_prob.exp().clamp(max=1 - 1e-6))
            cases[k - 1].append(torch.stack([odds, hit.float()], -1))
            followed = torch.zeros_like(seen)
            followed[text, at] = hit
            seen = followed & kept[:, k : k + length]
    every = [torch.cat(parts) for parts in cases]
    shares = [float(each[:, 1].mean().nan_to_num(0.0)) for each in every]
    return [round(float(share), 4) for share in np.cumprod(shares)], [
        _curve(each) for each in every
    ]


@torch.enable_grad()
def _curve(cases: Tensor) -> list[float]:
    """Return (a, b, m) of HiddenConfig's curves, fitted on cases [n, 2]: log-odds, 1 for right tokens."""
    odds, hit = cases.unbind(-1)
    if not len(odds) or not 0 < hit.mean() < 1:  # nothing to fit
        return [0.0, 1.0, float(hit.mean()) if len(hit) else 0.0]
    line = torch.tensor([0.0, 1.0], device=odds.device, requires_grad=True)
    fit = torch.optim.LBFGS([line], max_iter=50, line_search_fn="strong_wolfe")

    def miss() -> Tensor:
        fit.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(line[0] + line[1] * odds, hit)
        loss.backward()
        return loss

    fit.step(miss)  # type: ignore[arg-type]
    shift, slope = line.tolist()
    return [
        round(shift, 4),
        round(max(slope, 0.05), 4),
        round(float(hit.mean()), 4),
    ]  # likelier must stay likelier
