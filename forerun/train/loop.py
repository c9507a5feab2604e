"""One training loop for every model of the project: Muon and AdamW, atomic checkpoints, exact resume."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from forerun.files import write_text
from forerun.train.processes import Processes


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one training run.

    The learning rate rises linearly over `warmup` steps, stays, and falls linearly to 0 over the last
    `cooldown` share of `steps`.
    """

    steps: int
    batch: int  # windows a step
    length: int  # tokens a window
    lr: float = 4e-3
    warmup: int = 100
    cooldown: float = 0.4
    weight_decay: float = 0.05
    clip: float = 1.0
    seed: int = 0
    evaluate_every: int = 200
    save_every: int = 50
    compile: bool = True

    def rate(self, step: int) -> float:
        """Learning rate of a step, as a share of `lr`."""
        falling = (self.steps - step) / max(1.0, self.cooldown * self.steps)
        return max(0.0, min(1.0, (step + 1) / max(1, self.warmup), falling))


def optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon (with AdamW's update size) for inner matrices, AdamW for embeddings, heads, gains and biases."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    seen: set[int] = set()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        inner = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if inner else rest).append(parameter)
    chosen: list[torch.optim.Optimizer] = []
    if rest:
        chosen.append(torch.optim.AdamW(rest, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0))
    if matrices:
        chosen.append(
            torch.optim.Muon(matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    return chosen


def save_checkpoint(path: Path, step: int, model: nn.Module, optims: list[torch.optim.Optimizer]) -> None:
    """Writes model, optimizer state and step into one safetensors file; the old one stays until it is whole."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():  # tied parameters come once
        tensors[f"model.{name}"] = parameter.detach().clone().contiguous()
    for k, optim in enumerate(optims):
        for index, state in optim.state_dict()["state"].items():
            for name, value in state.items():
                tensors[f"optim.{k}.{index}.{name}"] = torch.as_tensor(value).clone().contiguous()
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, metadata={"step": str(step)})
    os.replace(temporary, path)


def load_checkpoint(path: Path, model: nn.Module, optims: list[torch.optim.Optimizer]) -> int:
    """Restores what `save_checkpoint` wrote; returns the number of finished steps."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        step = int(file.metadata()["step"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    for k, optim in enumerate(optims):
        whole = optim.state_dict()
        for name, value in tensors.items():
            if name.startswith(f"optim.{k}."):
                _, _, index, key = name.split(".", 3)
                whole["state"].setdefault(int(index), {})[key] = value
        optim.load_state_dict(whole)
    return step


def claim(folder: Path, settings: str) -> None:
    """Marks a folder as that of a run with these settings; raises ValueError where it is another's."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / "config.json"
    if mark.exists() and mark.read_text() != settings:
        raise ValueError(f"{folder} holds a run with other settings ({mark}): give another folder or remove it")
    if not mark.exists():
        write_text(mark, settings)


def train(
    model: nn.Module,
    loss: Callable[[Tensor], Tensor],
    batch: Callable[[int], Tensor],
    evaluate: Callable[[], float],
    config: TrainConfig,
    out: Path,
    say: Callable[[str], None] = print,
    sharing: Processes | None = None,
) -> None:
    """Trains `model` in place for `config.steps` steps and resumes from `out/checkpoint.safetensors` if it is there.

    `loss(batch) -> scalar` is what is minimised, `batch(step)` gives its input, `evaluate()` the validation loss.
    Processes that share the training take a batch each and average their gradients; the first one writes. Losses go to
    `out/log.jsonl`, one object a line. Raises ValueError when `out` belongs to a run with other settings.
    """
    sharing = sharing or Processes()
    if sharing.is_first:
        claim(out, json.dumps(asdict(config) | {"compile": None}, sort_keys=True))
    sharing.wait()
    device = next(model.parameters()).device
    optims = optimizers(model, config)
    checkpoint = out / "checkpoint.safetensors"
    step = load_checkpoint(checkpoint, model, optims) if checkpoint.exists() else 0
    if step:
        say(f"resuming {out.name} at step {step} of {config.steps}")
    # Without a C++ compiler the plain path is what there is.
    forward = torch.compile(loss) if config.compile and shutil.which("g++") else loss
    model.train()
    started, first = time.perf_counter(), step
    with (out / "log.jsonl" if sharing.is_first else Path(os.devnull)).open("a") as log:
        while step < config.steps:
            given = batch(step * sharing.count + sharing.rank).to(device)
            for optim in optims:
                optim.zero_grad(set_to_none=True)
                for group in optim.param_groups:
                    group["lr"] = config.lr * config.rate(step)
            value = forward(given)
            value.backward()
            sharing.average(model)
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            for optim in optims:
                optim.step()
            step += 1
            record = {"step": step, "loss": round(float(value.detach()), 4), "tokens": config.batch * config.length}
            if not math.isfinite(record["loss"]):
                raise ValueError(f"the loss of step {step} is {record['loss']}: lower the learning rate ({config.lr})")
            if not sharing.is_first:
                continue
            last = step == config.steps
            if step % config.evaluate_every == 0 or last:
                record["validation"] = round(evaluate(), 4)
            log.write(json.dumps(record) + "\n")
            log.flush()
            if step % config.save_every == 0 or last:
                save_checkpoint(checkpoint, step, model, optims)
            if step % 20 == 0 or last or "validation" in record:
                pace = (time.perf_counter() - started) / (step - first)
                held = f" validation {record['validation']:.3f}" if "validation" in record else ""
                say(
                    f"{out.name} step {step}/{config.steps} loss {record['loss']:.3f}{held} "
                    f"{record['tokens'] / pace:,.0f} tokens/s {pace * (config.steps - step) / 60:.0f} min left"
                )
    model.eval()
