"""The drafts that a pre-verifier learns from, gathered in files, so that a run goes on where it was stopped."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from time import perf_counter

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.model import CausalLM
from forerun.sampling import Sampler
from forerun.train.chats import read_chats
from forerun.train.processes import Processes
from forerun.train.rollout import Rollouts, roll_out
from forerun.train.texts import LEARNT, Texts, of_chats, of_windows

FIELDS = tuple(field.name for field in fields(Rollouts) if field.name != "anchors")
SHARD = 64  # conversations of a file
LOGITS = 1 << 26  # of a forward, at most; 8 texts at most


@dataclass(frozen=True)
class Shard:
    """Texts whose drafts are one file of that name.

    Attributes:
        greedy: whether the target wrote them greedily; else they were sampled.
        held: whether their drafts are kept for validation alone.
    """

    name: str
    texts: Texts
    greedy: bool
    held: bool = False


def of_own_output(folder: Path, prompt: int) -> list[Shard]:
    """Those of `own_output`'s files, whose windows begin with so many tokens of text; greedy ones have even numbers."""
    sources = sorted(folder.glob("[0-9]*.safetensors"))
    windows = [load_file(source)["tokens"].long().numpy() for source in sources]
    return [
        Shard(source.stem, of_windows(each, prompt - 1), number % 2 == 0)
        for number, (source, each) in enumerate(zip(sources, windows, strict=True))
    ]


def of_conversations(chats: Path, sequences: int, held: float, depths: tuple[int, int]) -> list[Shard]:
    """Those of the answers in a folder of conversations, texts of a length together.

    Of the train split at most `sequences`, half of them greedy and half at temperature 1; of the validation split that
    share of it. An answer holds a whole draft, of `depths` tokens greedily and sampled.

    Raises ValueError where there are none.
    """
    shards = []
    for split in LEARNT:
        every, validates = read_chats(chats, split), split == LEARNT[1]
        most = max(1, round(sequences // 2 * (held if validates else 1)))
        for kind, temperature, depth in (("greedy", 0.0, depths[0]), ("sampled", 1.0, depths[1])):
            chosen = [each for each in every if each.temperature == temperature and len(each.answer) >= depth]
            none = f"{chats} has no {kind} answer of {depth} tokens in its {split} conversations"
            if not chosen:
                raise ValueError(none)
            texts = of_chats(chosen)
            # Behind a long prompt an answer may have been cut.
            rows = (texts.ends - texts.begins >= depth).nonzero()[:most, 0]
            if not len(rows):
                raise ValueError(none)
            rows = rows[texts.ends[rows].argsort(stable=True)]
            for number, part in enumerate(rows.split(SHARD)):
                name = f"{split}-{kind}-{number:05d}"
                shards.append(Shard(name, _part(texts, part), kind == "greedy", validates))
    return shards


def collect(
    target: CausalLM,
    draft: CausalLM,
    shards: Sequence[Shard],
    folder: Path,
    sampler: Sampler,
    *,
    anchors: int,
    depths: tuple[int, int],
    seed: int,
    sharing: Processes,
    say: Callable[[str], None],
) -> None:
    """Writes this process's share of the drafts from every shard's texts; those that are there are left alone.

    `sampler` is what sampled texts were sampled with, `depths` are tokens of a draft, greedy and sampled.
    """
    folder.mkdir(exist_ok=True)
    begun, made = perf_counter(), 0
    own = list(enumerate(shards))[sharing.rank :: sharing.count]
    for done, (number, shard) in enumerate(own, 1):
        path = folder / f"{shard.name}.safetensors"
        if _is_whole(path):
            continue
        generator = torch.Generator(target.device).manual_seed(seed + number)
        texts, how = shard.texts.to(target.device), Sampler() if shard.greedy else sampler
        together = max(1, min(8, LOGITS // (texts.tokens.shape[1] * target.vocab_size)))
        parts = [
            roll_out(target, draft, _part(texts, rows), anchors, depths[not shard.greedy], how, generator)
            for rows in torch.arange(len(texts), device=target.device).split(together)
        ]
        tensors = {name: torch.cat([getattr(part, name) for part in parts]).cpu() for name in FIELDS}
        tensors["rows"] = torch.cat([part.rows.cpu() + together * at for at, part in enumerate(parts)])
        kept = {"hidden": torch.float16, "target": torch.float16, "tokens": torch.int32, "echoes": torch.int8}
        kept["rows"] = torch.int32
        tensors = {name: value.to(kept.get(name, value.dtype)).contiguous() for name, value in tensors.items()}
        temporary = path.with_suffix(".tmp")
        save_file(tensors, temporary)
        os.replace(temporary, path)
        made += 1
        left = (perf_counter() - begun) / made * (len(own) - done)
        say(f"drafts of {number + 1}/{len(shards)} shards, {left / 60:.0f} min left")


def gather(folder: Path, shards: Sequence[Shard]) -> dict[str, Tensor]:
    """The drafts of some shards, in their order; their `rows` number the texts of all."""
    parts, before = [load_file(folder / f"{shard.name}.safetensors") for shard in shards], 0
    for part, shard in zip(parts, shards, strict=True):
        part["rows"] = part["rows"] + before
        before += len(shard.texts)
    return {name: torch.cat([part[name] for part in parts]) for name in FIELDS}


def split(drafts: dict[str, Tensor], held: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Drafts to learn from, and those of the last `held` share of the texts."""
    texts = int(drafts["rows"].max()) + 1
    learnt = drafts["rows"] < texts - max(1, round(texts * held))
    return {k: v[learnt] for k, v in drafts.items()}, {k: v[~learnt] for k, v in drafts.items()}


def _is_whole(path: Path) -> bool:
    """Whether the file is there and has everything; those of earlier versions lack something."""
    if not path.exists():
        return False
    with safe_open(path, "pt") as file:
        return set(FIELDS) <= set(file.keys())


def _part(texts: Texts, rows: Tensor) -> Texts:
    """Some of the texts with the tokens behind their ends, which `Texts.take` cuts."""
    ends = texts.ends[rows]
    return Texts(texts.tokens[rows, : int(ends.max()) + 1], texts.begins[rows], ends)
