"""Training of heads that draft from the target's hidden states, on the target's own output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from forerun.files import write_text
from forerun.loading import config_file, load_head, load_model, load_tokenizer
from forerun.model import CausalLM, context_of
from forerun.nn.heads import FEATURES, FUSIONS, KINDS, HiddenConfig, HiddenDrafter, hot_set
from forerun.runtime.bits import BLOCK
from forerun.runtime.heads import head_rows
from forerun.train.chats import check_chats
from forerun.train.data import read_texts, tokenize
from forerun.train.head_losses import embeddings_of, loss_of, measure
from forerun.train.judged import Recall, judged
from forerun.train.loop import TrainConfig, claim, train
from forerun.train.own_output import behind_prompts, fingerprint
from forerun.train.processes import Processes, processes
from forerun.train.texts import Texts, check_sources, learnt_and_held, of_windows

SEED = 9000  # of the output; no draft is distilled with it
LOSSES = ("law", "regression")
EVALUATED = 128  # texts, while a head is trained
LONGEST = 65536  # context of a head whose target names none
_OF_FORM = ("kind", "num_hidden_layers", "rank", "known", "feature", "fusion", "hot_size", "intermediate_size")
_OF_RECIPE = ("sequences", "loss", "unroll", "held")


@dataclass(frozen=True)
class HeadRecipe:
    """How a head is trained.

    Attributes:
        sequences: windows of the target's own output, half of them greedy and half sampled. Each has `prompt` tokens of
            text and `output` tokens of output.
        steps, batch, lr, seed: of the training. A batch counts windows. All seeds use the same output.
        unroll: how many states ahead are trained, each from the head's own state before.
        loss: "law": cross-entropy with the target's distribution, end to end. "regression": EAGLE's form, SmoothL1 to
            the features and a tenth of that cross-entropy; token information is then trained on detached states.
        held: share of the windows kept for validation.
    """

    sequences: int = 2048
    prompt: int = 64
    output: int = 192
    steps: int = 2000
    batch: int = 8
    lr: float = 6e-3
    unroll: int = 4
    loss: str = "law"
    held: float = 0.04
    seed: int = 0


def train_head(
    target: str,
    data: Sequence[str],
    out: Path,
    recipe: HeadRecipe,
    kind: str = "lyanna",
    *,
    layers: int = 1,
    rank: int = 64,
    hot: float = 0.25,
    known: bool = True,
    feature: str = "head",
    fusion: str = "every",
    chats: Path | None = None,
    start: Path | None = None,
    work: Path | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Trains a head for this target and saves it in `out`; returns the figures of validation.

    Under `accelerate launch` the processes train together, a batch each a step.

    Args:
        hot: the hot set's share of the vocabulary.
        rank: of the token information; 0 trains a head without it.
        known, feature, fusion: see HiddenConfig.
        chats: a folder of conversations (`forerun.train.chat_data`), which take the place of `data` and of windows.
            Their validation split is the recipe's `held`.
        start: the folder of a head of the same form to go on from, with more of the target's output or another loss. It
            keeps its hot set. With the same data, more `sequences` begin with the same windows.
        work: holds the state of a stopped run, and the target's own output, which several heads may share. A folder of
            that name in `out` by default.
    Raises:
        ValueError: settings out of range, data that is missing or too little, windows longer than the context, a target
            without readable features, a `start` of another form or target, an `out` that holds another run.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    if feature not in FEATURES:
        raise ValueError(f"feature must be one of {', '.join(FEATURES)}, not {feature!r}")
    if fusion not in FUSIONS:
        raise ValueError(f"fusion must be one of {', '.join(FUSIONS)}, not {fusion!r}")
    if fusion == "first" and kind != "lyanna":
        raise ValueError(f"fusion first is for the kind lyanna: {kind} has no states that no token is fused with")
    if rank < 0:
        raise ValueError(f"rank must be at least 0, not {rank}")
    if recipe.loss not in LOSSES:
        raise ValueError(f"loss must be one of {', '.join(LOSSES)}, not {recipe.loss!r}")
    for name, value, most in (("hot", hot, 1.0), ("held", recipe.held, 0.5)):
        if not 0 < value <= most:
            raise ValueError(f"{name} must be above 0 and at most {most}, not {value}")
    if not 1 <= recipe.unroll < recipe.output:
        raise ValueError(f"unroll must be 1 to {recipe.output - 1}, less than the output, not {recipe.unroll}")
    if start is not None:
        if start.resolve() == out.resolve():
            raise ValueError(f"start and out are one folder, {str(out)!r}: give another out")
        config_file(start, f"the head {str(start)!r}")  # it is read when the target is there
    work, sharing = work or out / "work", processes()
    device = sharing.device(device)
    check_sources(data, chats)
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(target, trust_remote_code=trust_remote_code)
    stream = np.zeros(0)
    if chats is None:
        stream = tokenize(tokenizer, list(read_texts(data)), 0)
        if len(stream) < 4 * recipe.prompt:
            raise ValueError(f"--data holds {len(stream)} tokens; give at least {4 * recipe.prompt}")
    if chats is not None:
        check_chats(chats, tokenizer, target)
    made = None if chats is None else learnt_and_held(chats)
    model = load_model(target, "target", device=device, trust_remote_code=trust_remote_code, plain=True)
    text = model.config.get_text_config(decoder=True)
    length, context = recipe.prompt + recipe.output, context_of(text)
    if context is not None and length > context:
        raise ValueError(f"prompt + output is {length} tokens, more than the target's context of {context}")
    judge = CausalLM(model.requires_grad_(False))
    size = judge.head.get_parameter("weight").shape[-1]
    if model.get_input_embeddings().get_parameter("weight").shape[-1] != size:
        raise ValueError(f"the target's embeddings and its LM head are of other widths; its head reads {size}")
    if feature == "below":
        judge.last_layer()  # raises where there is none
        if judge.config.hidden_size != size:
            raise ValueError(f"the target's states are {judge.config.hidden_size} wide and its LM head reads {size}")
    config = _config(text, kind, size, layers, rank, max(1, round(hot * judge.vocab_size)), known)
    config.feature, config.fusion = feature, fusion
    begun = None if start is None else _begun(start, judge, config)
    folder = work / "training" / out.resolve().name
    if sharing.is_first:
        mark = {"target": judge.fingerprint, "data": list(data), "prompt": recipe.prompt, "output": recipe.output}
        claim(work, json.dumps(mark if chats is None else {"target": judge.fingerprint, "chats": str(chats)}))
        shape = {"kind": kind, "layers": layers, "rank": rank, "hot": hot, "known": known, "batches": sharing.count}
        usual = {"feature": "head", "fusion": "every"}  # runs from before there were others go on
        shape |= {name: getattr(config, name) for name in usual if getattr(config, name) != usual[name]}
        if made is not None:  # the hot set and the order of batches follow from them
            shape["texts"] = made[0].digest
        if begun is not None:  # by its weights: the folder may hold another head later
            shape["start"] = [fingerprint(begun), hashlib.sha256(begun.hot.cpu().numpy().tobytes()).hexdigest()]
        claim(folder / "settings", json.dumps(shape | {each: getattr(recipe, each) for each in _OF_RECIPE}))
    else:
        sharing.wait()
    if made is None:
        windows = behind_prompts(
            model,
            stream,
            work / "own-output",
            sequences=recipe.sequences,
            prompt=recipe.prompt,
            output=recipe.output,
            seed=SEED,
            say=say,
        )
        apart = np.s_[:: round(1 / recipe.held)]
        output, held = (of_windows(each, recipe.prompt) for each in (np.delete(windows, apart, 0), windows[apart]))
        learnt = replace(output, begins=torch.zeros_like(output.begins))  # from a window's text as well
    else:
        output, held = made
        learnt = output
    if sharing.is_first:
        sharing.wait()  # until then the others wait for the output
    counts, wanted = (each.frequencies(judge.vocab_size) for each in (output, held))
    source: dict[str, Any] = {"data": list(data)} if chats is None else {"chats": chats.name}
    config.target, config.recipe = judge.fingerprint, asdict(recipe) | {"target": target} | source
    torch.manual_seed(recipe.seed)
    drafter = HiddenDrafter(config)
    if begun is None:
        drafter.begin()
        drafter.hot.copy_(hot_set(counts, config.hot_size)[0])
    else:
        drafter.load_state_dict(begun.state_dict())
        config.recipe["start"] = {name: value for name, value in begun.config.recipe.items() if name != "validation"}
    coverage = float(wanted[drafter.hot].sum() / wanted.sum())
    nn.Module.to(drafter, model.device)
    head = head_rows(judge, drafter.hot, size)
    learnt, held = learnt.to(judge.device), held.to(judge.device)
    again = judged(judge, held, feature)
    _fit(drafter, judge, head, learnt, held, again, recipe, folder, say, sharing)
    if not sharing.is_first:
        return {}
    drafter.eval()
    found = measure(drafter, judge, head, held, again, recipe) | {"coverage": round(coverage, 4)}
    found["parameters"] = sum(parameter.numel() for parameter in drafter.parameters())
    drafter.config.curves = found.pop("curves")
    drafter.config.recipe["validation"] = found
    drafter.save_pretrained(out)
    write_text(out / "README.md", _card(drafter, found))
    say(f"the hot set covers {coverage:.2%} of held-out output; survival of a greedy chain {found['survival']}")
    say(f"the head is in {out}")
    return found


def _config(
    text: PreTrainedConfig, kind: str, size: int, layers: int, rank: int, hot: int, known: bool
) -> HiddenConfig:
    """That of a head for a target. All kinds are of one size: lyanna has the factors of a table, eagle has a
    wider MLP instead."""
    heads = text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    each = getattr(text, "head_dim", None) or size // heads
    inner = getattr(text, "intermediate_size", None) or 4 * size
    factors = rank * (text.vocab_size + hot)
    if kind == "eagle":
        inner += factors // (3 * size * layers)
        if inner >= 20 * BLOCK:  # whole blocks, which our product in 8 bits needs, where they are a small part
            inner = round(inner / BLOCK) * BLOCK
    rope = getattr(text, "rope_parameters", None) or {}
    return HiddenConfig(
        kind=kind,
        hidden_size=size,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=each,
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        num_hidden_layers=layers,
        rank=rank,
        known=known,
        vocab_size=text.vocab_size,
        hot_size=hot,
        max_position_embeddings=context_of(text) or LONGEST,
    )


def _begun(folder: Path, judge: CausalLM, config: HiddenConfig) -> HiddenDrafter:
    """The head to go on from; raises ValueError for one of another form than `config`'s, or of another target."""
    head = load_head(folder, judge)
    for name in _OF_FORM:
        there, wanted = getattr(head.config, name), getattr(config, name)
        if there != wanted:
            same = "kind, layers, rank, known, feature, fusion and hot"
            raise ValueError(f"the head {str(folder)!r} has {name} {there}, not {wanted}; give it the same {same}")
    return head


def _fit(
    drafter: HiddenDrafter,
    judge: CausalLM,
    head: tuple[Tensor, Tensor],
    learnt: Texts,
    held: Texts,
    again: Recall,
    recipe: HeadRecipe,
    work: Path,
    say: Callable[[str], None],
    sharing: Processes,
) -> None:
    def batch(step: int) -> Tensor:
        return learnt.batch(recipe.seed, step, recipe.batch)

    def loss_over(texts: Texts, recall: Recall, rows: Tensor) -> Tensor:
        part = texts.take(rows)
        with torch.autocast(judge.device.type, torch.bfloat16):  # a third of the time, and no worse a head
            return loss_of(drafter, head, recall(rows), part, embeddings_of(drafter, judge, part.tokens), recipe)

    recall, asked = judged(judge, learnt, drafter.config.feature), held.spread(EVALUATED)

    def loss(rows: Tensor) -> Tensor:
        return loss_over(learnt, recall, rows)

    @torch.no_grad()
    def evaluate() -> float:
        return float(torch.stack([loss_over(held, again, rows) for rows in asked.split(recipe.batch)]).mean())

    config = TrainConfig(
        steps=recipe.steps,
        batch=recipe.batch,
        length=recipe.prompt + recipe.output,
        lr=recipe.lr,
        warmup=50,
        cooldown=0.5,
        seed=recipe.seed,
        evaluate_every=250,
        save_every=100,
        compile=False,
    )
    train(drafter, loss, batch, evaluate, config, work, say, sharing)


def _card(drafter: HiddenDrafter, found: dict[str, Any]) -> str:
    recipe = drafter.config.recipe
    shares = ", ".join(f"{share:.3f}" for share in found["survival"])
    settings = json.dumps({name: value for name, value in recipe.items() if name != "validation"}, indent=1)
    return f"""---
library_name: forerun
---

# A head of the kind {drafter.config.kind} for speculative decoding

It drafts from the hidden states of `{recipe["target"]}` and fits no other model: a fingerprint in
config.json is compared when it is loaded.

{found["parameters"]:,} parameters. On held-out output its greedy chains are the target's own in their
first 1, 2, ... tokens in these shares: {shares}. Its hot set covers {found["coverage"]:.2%} of it.

```json
{settings}
```
"""
