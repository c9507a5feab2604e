"""The training loop of all recipes: Muon and AdamW, atomic checkpoints, exact resume.

A recipe is a function that makes the data, the model and the loss, and then calls `train`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.files import replace, write_text

BIG_MODEL = 200_000_000  # parameters
# Numbers of a matrix. With larger ones Muon's products take longer on a CPU than the step itself.
LARGE_MATRIX = 1 << 21
# Share of the learning rate for large matrices that are not new, because AdamW changes each number
# by the whole learning rate.
LARGE_MATRIX_SHARE = 0.02


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one run of the loop.

    The learning rate rises linearly over `warmup` steps, stays constant, and falls linearly to 0
    over the last `cooldown` share of `steps`.

    Attributes:
        tokens: how many tokens a step reads, for the log.
        known: whether the weights are those of another model instead of new ones.
    """

    steps: int
    lr: float = 4e-3
    warmup: int = 100
    cooldown: float = 0.4
    weight_decay: float = 0.05
    clip: float = 1.0
    evaluate_every: int = 200
    save_every: int = 50
    tokens: float = 0.0
    known: bool = False

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, as a share of `lr`."""
        falling = (self.steps - step) / max(1.0, self.cooldown * self.steps)
        return max(0.0, min(1.0, (step + 1) / max(1, self.warmup), falling))


@cache
def product_dtype(device_type: str) -> torch.dtype:
    """Return bfloat16 if a product in it is faster here than in float32, else float32.

    Processors without units for bfloat16 emulate it, several times slower.
    """
    if device_type != "cpu":
        return torch.bfloat16
    return min((torch.float32, torch.bfloat16), key=_seconds_of_product)


def _seconds_of_product(dtype: torch.dtype) -> float:
    matrix = torch.ones(256, 256, dtype=dtype)
    seconds = []
    for _ in range(4):
        started_at = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - started_at)
    return min(seconds)


def fastest(model: PreTrainedModel) -> PreTrainedModel:
    """Return a frozen model in `product_dtype` if it has at least BIG_MODEL parameters.

    For such models that saves hours.
    """
    if model.num_parameters() < BIG_MODEL:
        return model
    return nn.Module.to(model, product_dtype(model.device.type))


def mixed_precision(device: torch.device) -> torch.autocast:
    """Return a context in which products are computed in `product_dtype`."""
    dtype = product_dtype(device.type)
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


def optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Make the optimizers of a model.

    Muon (with AdamW's update size) trains inner matrices. AdamW trains embeddings, heads, gains and
    biases, and those matrices above LARGE_MATRIX that are known.
    """
    inner: list[nn.Parameter] = []
    large: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():  # tied parameters come once
        if not parameter.requires_grad:
            continue
        if parameter.ndim != 2 or "embed" in name or "lm_head" in name:
            others.append(parameter)
        elif config.known and parameter.numel() > LARGE_MATRIX:
            large.append(parameter)
        else:
            inner.append(parameter)
    groups = [
        {"params": parameters, "share": share}
        for parameters, share in ((others, 1.0), (large, LARGE_MATRIX_SHARE))
        if parameters
    ]
    chosen: list[torch.optim.Optimizer] = []
    if groups:
        chosen.append(torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0))
    if inner:
        chosen.append(
            torch.optim.Muon(inner, config.lr, config.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    return chosen


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file whole or not at all."""
    temporary = path.with_suffix(".tmp")
    save_file({name: value.contiguous() for name, value in tensors.items()}, temporary)
    replace(temporary, path)


def save_missing(
    paths: Sequence[Path],
    make: Callable[[int], Mapping[str, Tensor]],
    what: str,
    say: Callable[[str], None],
) -> None:
    """Write the files that do not exist yet, so that a stopped run continues.

    `make(number)` returns the tensors of a file. `say` gets a line of progress after each file, in
    which `what` names the files.
    """
    missing = [number for number, path in enumerate(paths) if not path.exists()]
    started_at = time.perf_counter()
    for done, number in enumerate(missing, 1):
        paths[number].parent.mkdir(parents=True, exist_ok=True)
        save_tensors(paths[number], make(number))
        left = (time.perf_counter() - started_at) / done * (len(missing) - done)
        say(f"{what}: {done}/{len(missing)} files, {span(left)} left")


def span(seconds: float) -> str:
    """Return a time in words: "40 s", "12 min", "3.5 h", "2.1 days"."""
    for unit, length, digits in (("days", 86_400, 1), ("h", 3600, 1), ("min", 60, 0)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.{digits}f} {unit}"
    return f"{seconds:.0f} s"


def save_checkpoint(
    path: Path, step: int, model: nn.Module, optims: list[torch.optim.Optimizer]
) -> None:
    """Write the model, the optimizers' state and the number of finished steps.

    The file is written whole or not at all.
    """
    temporary = path.with_suffix(".tmp")
    state = {
        "step": step,
        "model": model.state_dict(),
        "optims": [optim.state_dict() for optim in optims],
    }
    torch.save(state, temporary)
    replace(temporary, path)


def load_checkpoint(path: Path, model: nn.Module, optims: list[torch.optim.Optimizer]) -> int:
    """Restore what `save_checkpoint` wrote; return the number of finished steps."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    for optim, state in zip(optims, checkpoint["optims"], strict=True):
        optim.load_state_dict(state)
    return int(checkpoint["step"])


def claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Mark a folder as that of a run with these settings.

    Raises:
        ValueError: the folder holds a run with other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / "config.json"
    text = json.dumps(settings, sort_keys=True)
    if not mark.exists():
        write_text(mark, text)
    elif mark.read_text(encoding="utf-8") != text:
        raise ValueError(
            f"{folder} holds a run with other settings ({mark}): give another folder or remove it"
        )


def train(
    model: nn.Module,
    loss: Callable[[Tensor], Tensor],
    batch: Callable[[int], Tensor],
    evaluate: Callable[[], float],
    config: TrainConfig,
    folder: Path,
    say: Callable[[str], None] = print,
) -> None:
    """Train `model` in place for `config.steps` steps.

    It goes on from `folder/checkpoint.pt` if that exists. The folder must be `claim`ed. Losses go
    to `folder/log.jsonl`, one object per line. `batch(step)` returns a batch, `loss(batch)` the
    scalar to minimise, `evaluate()` the validation loss; `say` gets lines of progress.

    Raises:
        ValueError: a loss is not finite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    device = next(model.parameters()).device
    optims = optimizers(model, config)
    checkpoint = folder / "checkpoint.pt"
    first = load_checkpoint(checkpoint, model, optims) if checkpoint.exists() else 0
    if first:
        say(f"resuming {folder.name} at step {first} of {config.steps}")
    model.train()
    started_at = time.perf_counter()
    with (folder / "log.jsonl").open("a", encoding="utf-8") as log:
        for step in range(first + 1, config.steps + 1):
            value = _update(model, loss, batch(step - 1).to(device), optims, config, step)
            record = {"step": step, "loss": value}
            is_last = step == config.steps
            if step % config.evaluate_every == 0 or is_last:
                model.eval()
                with torch.no_grad():
                    record["validation"] = round(evaluate(), 4)
                model.train()
            log.write(json.dumps(record) + "\n")
            log.flush()
            if step % config.save_every == 0 or is_last:
                save_checkpoint(checkpoint, step, model, optims)
            if step == first + 2 or step % 20 == 0 or is_last or "validation" in record:
                step_seconds = (time.perf_counter() - started_at) / (step - first)
                say(f"{folder.name} {_progress(record, step_seconds, config)}")
    model.eval()


def _update(
    model: nn.Module,
    loss: Callable[[Tensor], Tensor],
    given: Tensor,
    optims: list[torch.optim.Optimizer],
    config: TrainConfig,
    step: int,
) -> float:
    """Change the model by the loss of one batch; return the loss.

    `step` is the number of the step, from 1 on.
    """
    for optim in optims:
        optim.zero_grad(set_to_none=True)
        for group in optim.param_groups:
            group["lr"] = config.lr * config.rate(step - 1) * group.get("share", 1.0)
    value = loss(given)
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    for optim in optims:
        optim.step()
    rounded = round(float(value.detach()), 4)
    if not math.isfinite(rounded):
        raise ValueError(
            f"the loss of step {step} is {rounded}: lower the learning rate ({config.lr})"
        )
    return rounded


def _progress(record: dict[str, float], step_seconds: float, config: TrainConfig) -> str:
    """Return a line about a step: its losses, the speed and the time that is left."""
    step = int(record["step"])
    line = f"step {step}/{config.steps} loss {record['loss']:.3f}"
    if "validation" in record:
        line += f" validation {record['validation']:.3f}"
    if config.tokens:
        line += f", {config.tokens / step_seconds:,.0f} tokens/s"
    return f"{line}, {span(step_seconds * (config.steps - step))} left"


def save_card(out: Path, title: str, text: str, recipe: Mapping[str, Any]) -> None:
    """Write README.md beside the weights: what was trained, and how."""
    without_figures = {name: value for name, value in recipe.items() if name != "validation"}
    settings = json.dumps(without_figures, indent=1)
    write_text(
        out / "README.md",
        f"---\nlibrary_name: forerun\n---\n\n# {title}\n\n{text}\n\n```json\n{settings}\n```\n",
    )
