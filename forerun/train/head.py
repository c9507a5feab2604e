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
from forerun.backends import architectures, prepare
from forerun.backends.heads import head_rows
from forerun.backends.hot import hot_tokens
from forerun.backends.panels import BLOCK_INPUTS
from forerun.backends.stored import StoredLinear, is_stored
from forerun.heads.eagle3 import Eagle3Head
from forerun.heads.heads import HEAD_KINDS, HeadLayer, HiddenConfig, HiddenDrafter, hot_set
from forerun.model.causal_lm import CausalLM, context_of
from forerun.train.labels import Labels, cross_entropy, in_parts, label
from forerun.train.loop import TrainConfig, mixed_precision, product_dtype, save_card, train
from forerun.train.run import OwnOutput, Run, check_context
from forerun.train.texts import Texts, load_train_val, split_windows
from forerun.zoo import ModelSource, own_draft

HEAD_OUTPUT_SEED = 9000  # no draft is distilled with this seed of the output
HEAD_EVALUATION_TEXTS = 128  # how many texts an evaluation reads while a head is trained
DEFAULT_CONTEXT = 65536  # context of a head whose target names none
MAX_HOT_TOKENS = 16384
MAX_HEAD_PARAMETERS = 31_000_000  # they take 24 MB in 6 bits

HeadWeights = tuple[Tensor, Tensor]  # weight [S, d] and bias [S] of an LM head


@dataclass(frozen=True)
class HeadRecipe:
    """How a head is made.

    Attributes:
        sequences: windows of the target's own output, half of them greedy. All seeds use the same
            windows.
        prompt: tokens of text in a window.
        output: tokens of output in a window.
        batch: texts of a step.
        unroll: how many states ahead are trained; each follows from the head's own state before it.
        held: share of the windows that is kept for validation.
        kind: one of HEAD_KINDS.
        layers: decoder layers of the head.
        rank: of the token information; 0 trains a head without it.
        hot: the hot set's share of the vocabulary; by default a quarter, but at most
            MAX_HOT_TOKENS tokens.
        inner: neurons of the head's MLP; by default as many as the target's MLP has and
            MAX_HEAD_PARAMETERS allows.
        copied: begin with the target's last layer.
        linear: steps before `steps` that train a copied head without its layers, whose output is
            still 0 then.
    """

    sequences: int = 2048
    prompt: int = 64
    output: int = 192
    steps: int = 2000
    batch: int = 8
    lr: float = 6e-3
    unroll: int = 4
    held: float = 0.04
    seed: int = 0
    kind: str = "lyanna"
    layers: int = 1
    rank: int = 64
    hot: float | None = None
    inner: int | None = None
    copied: bool = True
    linear: int = 150

    def check(self) -> None:
        """Raise ValueError for a setting out of range."""
        unrolled = f"1 to {self.output - 1}, less than the output"
        for name, is_right, allowed in (
            ("kind", self.kind in HEAD_KINDS, f"one of {', '.join(HEAD_KINDS)}"),
            ("layers", self.layers >= 1, "at least 1"),
            ("rank", self.rank >= 0, "at least 0"),
            ("hot", self.hot is None or 0 < self.hot <= 1, "above 0 and at most 1"),
            ("inner", self.inner is None or self.inner > 0, "at least 1"),
            ("held", 0 < self.held <= 0.5, "above 0 and at most 0.5"),
            ("unroll", 1 <= self.unroll < self.output, unrolled),
        ):
            if not is_right:
                raise ValueError(f"{name} must be {allowed}, not {asdict(self)[name]!r}")


@dataclass(frozen=True)
class _Training:
    """A head with what its training needs."""

    run: Run
    recipe: HeadRecipe
    drafter: HiddenDrafter
    embed: nn.Module  # the target's embeddings
    weights: HeadWeights  # rows of the target's LM head for the hot set
    labels: Labels
    texts: Texts  # those of `labels`, on the CPU
    val_labels: Labels
    val: Texts  # those of `val_labels`, on the CPU

    def fit(self, is_copied: bool, is_known: bool) -> None:
        """Train the head.

        Args:
            is_copied: whether the head is new and begins with the target's last layer.
            is_known: whether the head has another model's weights.
        """
        recipe = self.recipe
        folder = self.run.folder
        config = TrainConfig(
            recipe.steps,
            recipe.lr,
            warmup=50,
            cooldown=0.5,
            evaluate_every=250,
            tokens=recipe.batch * self.texts.mean_length,
            known=is_known,
        )
        if is_copied and recipe.linear:
            layers = self.drafter.layers
            self.drafter.layers = nn.ModuleList()
            self._train(
                replace(config, steps=recipe.linear, warmup=5, evaluate_every=50),
                folder / "linear",
            )
            self.drafter.layers = layers
        self._train(config, folder)

    def _train(self, config: TrainConfig, folder: Path) -> None:
        batch = partial(self.texts.batch, self.recipe.seed, size=self.recipe.batch)
        train(self.drafter, self._loss, batch, self._evaluate, config, folder, self.run.say)

    def _loss(self, rows: Tensor) -> Tensor:
        return self._loss_on(self.labels, rows)

    def _loss_on(self, labels: Labels, rows: Tensor) -> Tensor:
        unroll = self.recipe.unroll
        return head_loss(self.drafter, self.weights, labels, rows, self.embed, unroll)

    def _evaluate(self) -> float:
        """Return the validation loss, and say how many drafted tokens would be accepted."""
        losses = [
            self._loss_on(self.val_labels, rows)
            for rows in self.val.spread(HEAD_EVALUATION_TEXTS).split(self.recipe.batch)
        ]
        with mixed_precision(self.val_labels.texts.tokens.device):
            survival, _ = self.measure()
        self.run.say(f"acceptance: a greedy chain's first 1, 2, ... tokens {survival}")
        return float(torch.stack(losses).mean())

    def measure(self) -> tuple[list[float], list[list[float]]]:
        """Return the figures of `measure` on the validation texts."""
        return measure(self.drafter, self.weights, self.val_labels, self.embed, self.recipe.unroll)


def train_head(run: Run, recipe: HeadRecipe, start: Path | None = None) -> dict[str, Any]:
    """Train a head and save it in `run.out`; return the figures of validation.

    `start` is the folder of a head of the same form to go on from; it keeps its hot set.

    Raises:
        ValueError: settings, data, models or folders do not fit.
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
    config.target = target.fingerprint
    config.recipe = asdict(recipe) | run.provenance
    torch.manual_seed(recipe.seed)
    drafter = HiddenDrafter(config)
    drafter.begin()
    settings: dict[str, Any] = {"texts": parts and parts[0].digest}
    if start is not None:
        settings["start"] = _continue(drafter, start, target)
    run.claim(
        {"target": target.fingerprint, "prompt": recipe.prompt, "output": recipe.output},
        asdict(recipe) | settings,
    )
    texts, val = parts or _own_texts(run, target, stream, recipe)
    if start is None:
        counts = _output_counts(texts, recipe, run.chats is None, target.vocab_size)
        drafter.hot.copy_(_hot(run.target, counts, config.hot_size))
    coverage = _coverage(drafter.hot, val.frequencies(target.vocab_size))
    nn.Module.to(drafter, model.device)
    labels = label(run, target, texts, states=True)
    val_labels = label(run, target, val, states=True)
    weights = head_rows(target, drafter.hot, size)
    training = _Training(run, recipe, drafter, embed, weights, labels, texts, val_labels, val)
    is_copied = start is None and recipe.copied and _is_copyable(target)
    # A checkpoint replaces the weights that a new training would begin with.
    is_new = not (run.folder / "checkpoint.pt").exists()
    if is_copied and is_new:
        initialise(drafter, target, labels, embed)
    training.fit(is_copied and is_new, is_known=is_copied or start is not None)
    survival, drafter.config.curves = training.measure()
    figures: dict[str, Any] = {
        "survival": survival,
        "coverage": round(coverage, 4),
        "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
    }
    drafter.config.recipe["validation"] = figures
    drafter.save_pretrained(run.out)
    _report(run, recipe, drafter, coverage)
    return figures


def _own_texts(
    run: Run, target: CausalLM, stream: np.ndarray | None, recipe: HeadRecipe
) -> tuple[Texts, Texts]:
    """Return windows of the target's own output, for training and for validation.

    The prompts count in training only.
    """
    output = OwnOutput(
        sequences=recipe.sequences,
        prompts=[recipe.prompt],
        length=recipe.prompt + recipe.output,
        temperatures=(0.0, 1.0),
        seed=HEAD_OUTPUT_SEED,
    )
    windows = np.concatenate(run.own_output(target, stream, output))
    return split_windows(windows, recipe.held, 0, recipe.prompt)


def _output_counts(texts: Texts, recipe: HeadRecipe, are_windows: bool, vocab_size: int) -> Tensor:
    """Return [V] how often each token occurs in the target's output.

    In windows the prompts count for training, but they are not output.
    """
    if are_windows:
        texts = replace(texts, begins=torch.full_like(texts.begins, recipe.prompt))
    return texts.frequencies(vocab_size)


def _coverage(hot: Tensor, counts: Tensor) -> float:
    """Return which share of tokens, counted [V], are in the hot set [S]."""
    return float(counts[hot].sum() / counts.sum())


def _is_copyable(target: CausalLM) -> bool:
    """Return whether a head's layer has the form of the target's layers."""
    model: Any = target.model
    architecture = architectures.of_model(model)
    return architecture is not None and architecture.table(model).layers[-1].is_usual


def _report(run: Run, recipe: HeadRecipe, drafter: HiddenDrafter, coverage: float) -> None:
    """Write the card of a trained head, and say where the head is."""
    figures = drafter.config.recipe["validation"]
    shares = ", ".join(f"{share:.3f}" for share in figures["survival"])
    text = (
        f"It drafts from the hidden states of `{run.target}` and fits no other model: a "
        "fingerprint in\nconfig.json is compared when it is loaded.\n\n"
        f"{figures['parameters']:,} parameters. On held-out output its greedy chains are the "
        "target's own in their\nfirst 1, 2, ... tokens in these shares: "
        f"{shares}. Its hot set covers {coverage:.2%} of it."
    )
    title = f"A head of the kind {recipe.kind} for speculative decoding"
    save_card(run.out, title, text, drafter.config.recipe)
    run.say(
        f"the hot set covers {coverage:.2%} of held-out output; survival of a greedy chain "
        f"{figures['survival']}"
    )
    options = f"--target {run.target} --method {recipe.kind} --head {run.out}"
    run.say(f"the head is in {run.out}: forerun generate {options}")


def _config(text: PreTrainedConfig, size: int, recipe: HeadRecipe) -> HiddenConfig:
    """Return the configuration of a head for a target with the configuration `text`.

    Both kinds have one size: where lyanna has the factors of a table, eagle has a wider MLP.
    """
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or size // heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    if recipe.hot is None:
        hot = min(MAX_HOT_TOKENS, text.vocab_size // 4)
    else:
        hot = round(recipe.hot * text.vocab_size)
    hot = max(1, hot)
    table = recipe.rank * (text.vocab_size + hot)
    attention = recipe.layers * 2 * size * head_dim * (heads + groups)
    inner = recipe.inner
    if inner is None:
        targets = getattr(text, "intermediate_size", None) or 4 * size
        left = MAX_HEAD_PARAMETERS - table - 2 * size**2 - attention
        inner = min(
            targets,
            max(BLOCK_INPUTS, left // (3 * size * recipe.layers * BLOCK_INPUTS) * BLOCK_INPUTS),
        )
    if recipe.kind == "eagle":
        inner += table // (3 * size * recipe.layers)
        # Our product in 8 bits needs whole blocks. Below 20 blocks a block is too large a part.
        if inner >= 20 * BLOCK_INPUTS:
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
        max_position_embeddings=context_of(text) or DEFAULT_CONTEXT,
    )


def _hot(target: str, counts: Tensor, size: int) -> Tensor:
    """Return the hot set [S].

    It is the first `size` tokens that are named for the target's own draft, if these are enough,
    else the most frequent tokens by `counts` [V].
    """
    draft = own_draft(target)
    folder = None if draft is None else ModelSource.parse(draft, "draft").hot_folder
    known = hot_tokens(folder if isinstance(folder, Path) else None, None, len(counts))
    if known is not None and len(known) >= size:
        return known[:size]
    return hot_set(counts, size)[0]


@torch.no_grad()
def initialise(drafter: HiddenDrafter, target: CausalLM, labels: Labels, embed: nn.Module) -> None:
    """Begin a head with the target's last layer behind a linear map.

    Least squares find the map from features and tokens to the next feature. The layer's output does
    not count yet, so the first drafts are those of the map. Of the MLP's neurons those with the
    largest weights are kept. Token information begins with the principal components of the target's
    embeddings.
    """
    model: Any = target.model
    _copy_layer(cast(HeadLayer, drafter.layers[-1]), model.model.layers[-1])
    gain = model.model.norm.weight.float().clamp(min=0.1)
    drafter.norm.weight.copy_(gain)
    drafter.fuse.weight.copy_(_linear_map(labels, embed, gain, drafter.config.hidden_size))
    rank = drafter.config.rank
    if drafter.informed and rank <= drafter.config.hidden_size:
        known = embed(drafter.hot).float()
        axes = torch.linalg.eigh(known.T @ known).eigenvectors[:, -rank:]
        for tokens in torch.arange(drafter.config.vocab_size, device=target.device).split(8192):
            components = embed(tokens).float() @ axes
            drafter.embed.weight[tokens] = functional.rms_norm(components, (rank,))


def _copy_layer(copy: HeadLayer, layer: Any) -> None:
    """Copy a target's layer into a head's, except for the weights of its outputs."""
    projections = [getattr(layer.self_attn, f"{name}_proj") for name in "qkv"]
    copy.qkv.weight.copy_(torch.cat([_weight(linear) for linear in projections]))
    if copy.qkv.bias is not None:
        copy.qkv.bias.copy_(torch.cat([linear.bias for linear in projections]))
    gate = _weight(layer.mlp.gate_proj)
    up = _weight(layer.mlp.up_proj)
    down = _weight(layer.mlp.down_proj)
    inner = copy.down.in_features
    sizes = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    kept = sizes.topk(min(inner, len(gate))).indices
    copy.gate_up.weight[: len(kept)] = gate[kept]
    copy.gate_up.weight[inner : inner + len(kept)] = up[kept]
    copy.before_attention.weight.copy_(layer.input_layernorm.weight)
    copy.before_mlp.weight.copy_(layer.post_attention_layernorm.weight)


def _linear_map(labels: Labels, embed: nn.Module, gain: Tensor, size: int) -> Tensor:
    """Return the map [d, 2 d] from a feature and the next token's embedding to the next feature.

    `gain` [d] multiplies what the map returns.
    """
    device = gain.device
    moments = torch.zeros(2 * size, 2 * size, device=device)
    products = torch.zeros(2 * size, size, device=device)
    for rows in labels.texts.spread(512).split(8):
        part = labels.texts.take(rows)
        features = labels.states(rows)
        following = functional.rms_norm(embed(part.tokens).float(), (size,)).roll(-1, 1)
        places = torch.arange(features.shape[1], device=device)
        seen = places < labels.texts.ends[rows][:, None] - 1
        x = torch.cat([features, following], -1)[seen]
        y = (features.roll(-1, 1) / gain)[seen]
        moments += x.T @ x
        products += x.T @ y
    moments.diagonal().add_(3e-3 * moments.diagonal().mean())
    return torch.linalg.solve(moments, products).T


def _weight(linear: Any) -> Tensor:
    return linear.stored.floats() if isinstance(linear, StoredLinear) else linear.weight


def _continue(drafter: HiddenDrafter, start: Path, target: CausalLM) -> str:
    """Give a new head the weights of a trained one.

    Returns:
        A hash of the weights, because the folder may hold another head later.

    Raises:
        ValueError: the trained head has another form or target.
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
    recipe = dict(first.config.recipe)
    recipe.pop("validation", None)
    drafter.config.recipe["start"] = recipe
    digest = hashlib.sha256()
    for path in sorted(start.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def head_logits(
    drafter: HiddenDrafter, weights: HeadWeights, states: Tensor, after: Tensor
) -> Tensor:
    """Return logits [n, S] of drafted states [n, d] that follow tokens [n]."""
    logits = functional.linear(states.to(weights[0].dtype), *weights).float()
    return logits + drafter.token_information(after) if drafter.informed else logits


def head_loss(
    drafter: HiddenDrafter,
    weights: HeadWeights,
    labels: Labels,
    rows: Tensor,
    embed: nn.Module,
    unroll: int,
) -> Tensor:
    """Return the mean cross-entropy with the target's distributions over all steps of drafts.

    It goes backward inside, as `in_parts` does.

    Args:
        drafter: the head.
        weights: the result of `head_rows` for the hot set.
        labels: the target's labels.
        rows: the numbers of the texts to draft from.
        embed: the target's embeddings.
        unroll: the number of steps.
    """
    weight, bias = weights
    dtype = product_dtype(weight.device.type)
    cast_weights = weight.to(dtype), bias.to(dtype)  # once instead of for each product
    part = labels.texts.take(rows)
    features = labels.states(rows)
    length = part.tokens.shape[1]
    wanted = labels.probs(rows).within(drafter.hot, drafter.config.vocab_size)
    # Of each position its number among those that count.
    numbers = part.counted().flatten().cumsum(0) - 1

    def loss(after: Tensor, positions: Tensor, states: Tensor, chosen: slice) -> Tensor:
        """Return the summed loss of states that stand for positions, after tokens."""
        logits = head_logits(drafter, cast_weights, states, after[chosen])
        return cross_entropy(logits, wanted.at(numbers[positions[chosen]]))

    total = features.new_zeros(())
    # bfloat16 takes a third of the time and gives no worse a head.
    with mixed_precision(features.device):
        drafts = drafter.drafted(features, embed(part.tokens).float(), unroll)
        for k, drafted in enumerate(drafts, 1):
            text, at = part.counted(k).nonzero(as_tuple=True)
            step_loss = partial(loss, part.tokens[text, at + k], text * length + at + k)
            total = total + in_parts(drafted[text, at], step_loss, unroll * max(1, len(at)))
    return total


@torch.no_grad()
def measure(
    drafter: HiddenDrafter, weights: HeadWeights, labels: Labels, embed: nn.Module, unroll: int
) -> tuple[list[float], list[list[float]]]:
    """Return figures of greedy chains from every position of the output.

    The first is for each k the share of chains whose first k tokens are the target's argmax; the
    second are the curves of `HiddenConfig`.

    The tokens in between are those of the text. A chain ends where one of them is not the target's
    argmax, so the share is the product of the shares among those chains that go on.
    """
    weight, bias = weights
    full_weights = weight.float(), bias.float()
    batches = labels.texts.ends.cpu().argsort(stable=True).split(16)
    parts = [_chain_cases(drafter, full_weights, labels, rows, embed, unroll) for rows in batches]
    cases = [torch.cat(place) for place in zip(*parts, strict=True)]
    shares = [float(place[:, 1].mean().nan_to_num(0.0)) for place in cases]
    survival = [round(float(share), 4) for share in np.cumprod(shares)]
    return survival, [_curve(place) for place in cases]


def _chain_cases(
    drafter: HiddenDrafter,
    weights: HeadWeights,
    labels: Labels,
    rows: Tensor,
    embed: nn.Module,
    unroll: int,
) -> list[Tensor]:
    """Return cases [n, 2] for each place of greedy chains from some texts.

    A case is the log-odds of the head's argmax, and 1 if it is the target's argmax, else 0. Chains
    that ended before the place have none.
    """
    part = labels.texts.take(rows)
    argmax = torch.full_like(part.tokens, -1)
    argmax[part.counted()] = labels.probs(rows).tokens[:, 0]
    followed = argmax == part.tokens.roll(-1, 1)  # the text goes on with the target's argmax
    alive = part.counted(unroll)
    length = alive.shape[1]
    drafts = drafter.drafted(labels.states(rows), embed(part.tokens).float(), unroll)
    cases = []
    for k, states in enumerate(drafts, 1):
        text, at = alive.nonzero(as_tuple=True)
        logits = head_logits(drafter, weights, states[text, at], part.tokens[text, at + k])
        log_prob, best = logits.log_softmax(-1).max(-1)
        hit = drafter.hot[best] == argmax[text, at + k]
        odds = log_prob - torch.log1p(-log_prob.exp().clamp(max=1 - 1e-6))
        cases.append(torch.stack([odds, hit.float()], -1))
        hits = torch.zeros_like(alive)
        hits[text, at] = hit
        alive = hits & followed[:, k : k + length]
    return cases


@torch.enable_grad()
def _curve(cases: Tensor) -> list[float]:
    """Return (a, b, m) of HiddenConfig's curves, fitted on cases [n, 2] as of `_chain_cases`."""
    odds, hit = cases.unbind(-1)
    if not len(odds) or not 0 < hit.mean() < 1:  # there is nothing to fit
        return [0.0, 1.0, float(hit.mean()) if len(hit) else 0.0]
    line = torch.tensor([0.0, 1.0], device=odds.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([line], max_iter=50, line_search_fn="strong_wolfe")

    def miss() -> Tensor:
        optimizer.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(line[0] + line[1] * odds, hit)
        loss.backward()
        return loss

    optimizer.step(miss)
    shift, slope = line.tolist()
    slope = max(slope, 0.05)  # a likelier token must stay likelier
    return [round(shift, 4), round(slope, 4), round(float(hit.mean()), 4)]
