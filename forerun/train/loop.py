"""The training loop of all recipes: Muon and AdamW, atomic checkpoints, exact resume.

A recipe is a function that makes the data, the model and the loss, and calls `train`.
"""

from __future__ import annotations

import json
import math
import os
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

from forerun.files import write_text

BIG = 200_000_000  # parameters
LARGE = (
    1 << 21
)  # numbers of a matrix, beyond which Muon's products take longer on a CPU than the step itself
LARGE_SHARE = 0.02  # of the learning rate, for large matrices that are not new: AdamW changes them by the whole of it


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one run of the loop.

    The learning rate rises linearly over `warmup` steps, stays, and falls linearly to 0 over the last `cooldown` share
    of `steps`. `tokens` is what a step reads, for the log. `known`: weights are not new, but those of another model.
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
    matrix, seconds = torch.ones(256, 256, dtype=dtype), []
    for _ in range(4):
        begun = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def fastest(model: PreTrainedModel) -> PreTrainedModel:
    """Return a frozen model in `product_dtype` where that saves hours: from BIG parameters on."""
    if model.num_parameters() < BIG:
        return model
    return nn.Module.to(model, product_dtype(model.device.type))


def mixed_precision(device: torch.device) -> torch.autocast:
    """Return a context whose products are in `product_dtype`."""
    dtype = product_dtype(device.type)
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


def optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Make Muon (with AdamW's update size) for inner matrices, AdamW for embeddings, heads, gains, biases and LARGE
    matrices that are known."""
    inner: list[nn.Parameter] = []
    large: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():  # tied parameters come once
        if parameter.requires_grad:
            is_inner = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            is_large = config.known and parameter.numel() > LARGE
            (others if not is_inner else large if is_large else inner).append(parameter)
    chosen: list[torch.optim.Optimizer] = []
    if groups := [
        {"params": own, "share": share}
        for own, share in ((others, 1.0), (large, LARGE_SHARE))
        if own
    ]:
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
    os.replace(temporary, path)


def save_missing(
    paths: Sequence[Path],
    make: Callable[[int], Mapping[str, Tensor]],
    what: str,
    say: Callable[[str], None],
) -> None:
    """Write what `make` returns for the numbers of paths that do not exist yet. A stopped run thus continues."""
    missing = [number for number, path in enumerate(paths) if not path.exists()]
    started = time.perf_counter()
    for done, number in enumerate(missing, 1):
        paths[number].parent.mkdir(parents=True, exist_ok=True)
        save_tensors(paths[number], make(number))
        left = (time.perf_counter() - started) / done * (len(missing) - done)
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
    """Write the model, the optimizers' state and the number of finished steps, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    torch.save(
        {
            "step": step,
            "model": model.state_dict(),
            "optims": [each.state_dict() for each in optims],
        },
        temporary,
    )
    os.replace(temporary, path)


def load_checkpoint(path: Path, model: nn.Module, optims: list[torch.optim.Optimizer]) -> int:
    """Restore what `save_checkpoint` wrote; return the number of finished steps."""
    found = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(found["model"])
    for optim, state in zip(optims, found["optims"], strict=True):
        optim.load_state_dict(state)
    return int(found["step"])


def claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Mark a folder as that of a run with these settings; raise ValueError if the folder is another run's."""
    folder.mkdir(parents=True, exist_ok=True)
    mark, text = folder / "config.json", json.dumps(settings, sort_keys=True)
    if mark.exists() and mark.read_text() != text:
        raise ValueError(
            f"{folder} holds a run with other settings ({mark}): give another folder or remove it"
        )
    if not mark.exists():
        write_text(mark, text)


def train(
    model: nn.Module,
    loss: Callable[[Tensor], Tensor],
    batch: Callable[[int], Tensor],
    evaluate: Callable[[], float],
    config: TrainConfig,
    folder: Path,
    say: Callable[[str], None] = print,
) -> None:
    """Train `model` in place for `config.steps` steps, from `folder/checkpoint.pt` on if it is there.

    `loss(batch)` is the scalar to minimise, `batch(step)` gives its input, `evaluate()` the validation loss. Losses go
    to `folder/log.jsonl`, one object a line. The folder must be `claim`ed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    device = next(model.parameters()).device
    optims = optimizers(model, config)
    checkpoint = folder / "checkpoint.pt"
    step = load_checkpoint(checkpoint, model, optims) if checkpoint.exists() else 0
    if step:
        say(f"resuming {folder.name} at step {step} of {config.steps}")
    model.train()
    started, first = time.perf_counter(), step
    with (folder / "log.jsonl").open("a") as log:
        while step < config.steps:
            given = batch(step).to(device)
            for optim in optims:
                optim.zero_grad(set_to_none=True)
                for group in optim.param_groups:
                    group["lr"] = config.lr * config.rate(step) * group.get("share", 1.0)
            value = loss(given)
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            for optim in optims:
                optim.step()
            step += 1
            record = {"step": step, "loss": round(float(value.detach()), 4)}
            if not math.isfinite(record["loss"]):
                raise ValueError(
                    f"the loss of step {step} is {record['loss']}: lower the learning rate ({config.lr})"
                )
            last = step == config.steps
            if step % config.evaluate_every == 0 or last:
                model.eval()
                with torch.no_grad():
                    record["validation"] = round(evaluate(), 4)
                model.train()
            log.write(json.dumps(record) + "\n")
            log.flush()
            if step % config.save_every == 0 or last:
                save_checkpoint(checkpoint, step, model, optims)
            if step == first + 2 or step % 20 == 0 or last or "validation" in record:
                each = (time.perf_counter() - started) / (step - first)
                held = f" validation {record['validation']:.3f}" if "validation" in record else ""
                rate = f", {config.tokens / each:,.0f} tokens/s" if config.tokens else ""
                left = f"{span(each * (config.steps - step))} left"
                say(
                    f"{folder.name} step {step}/{config.steps} loss {record['loss']:.3f}{held}{rate}, {left}"
                )
    model.eval()


def save_card(out: Path, title: str, text: str, recipe: Mapping[str, Any]) -> None:
    """Write what was trained and how beside the weights, as README.md."""
    settings = json.dumps(
        {name: value for name, value in recipe.items() if name != "validation"}, indent=1
    )
    write_text(
        out / "README.md",
        f"---\nlibrary_name: forerun\n---\n\n# {title}\n\n{text}\n\n```json\n{settings}\n```\n",
    )
