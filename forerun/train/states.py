"""Answers with the target's states behind every token, which the target had while it wrote them. Kept in files, so that
training need not run the target again."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from forerun.draft import Draft
from forerun.engine import Engine
from forerun.files import read_text
from forerun.generation import Generation, Request
from forerun.methods.ar import PlainDrafter
from forerun.model import CausalLM
from forerun.sampling import Verdict
from forerun.train.chats import Conversation
from forerun.train.laws import Law, law_of


class Listener(PlainDrafter):
    """No draft, but the LM head's inputs are kept.

    Attributes:
        heard: of each sequence that has left, by id, [n - 1, d] at all of its n tokens but the last.
    """

    wants_hidden = True

    def __init__(self) -> None:
        self.heard: dict[int, Tensor] = {}
        self._parts: dict[int, list[Tensor]] = {}

    def admit(self, seq: Generation, hidden: Tensor | None, chunk: int) -> Iterable[int]:
        assert hidden is not None
        self._parts[seq.id] = [hidden]
        return ()

    def observe(
        self, seqs: list[Generation], drafts: list[Draft], verdicts: list[Verdict], hidden: list[Tensor] | None
    ) -> None:
        assert hidden is not None
        for seq, states in zip(seqs, hidden, strict=True):
            self._parts[seq.id].append(states)

    def drop(self, seq: Generation) -> None:
        self.heard[seq.id] = torch.cat(self._parts.pop(seq.id))


def answered(target: CausalLM, asked: Sequence[Request], rows: int) -> tuple[list[list[int]], list[Tensor]]:
    """The new tokens of each request, and the states [n - 1, d] at all tokens but the last, those of its prompt
    included. At most `rows` are decoded together."""
    listener = Listener()
    engine = Engine(target, listener, max_rows=rows)
    tokens: dict[int, list[int]] = {engine.add(each): [] for each in asked}
    while engine.busy:
        for step in engine.step():
            if step.error is not None:
                raise step.error
            tokens[step.id] += step.tokens
    return list(tokens.values()), [listener.heard[id] for id in tokens]


def save_states(path: Path, states: Sequence[Tensor]) -> None:
    """Writes states [n_i, d] of several texts, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    lengths = torch.tensor([len(each) for each in states])
    save_file({"states": torch.cat(list(states)).bfloat16().contiguous(), "lengths": lengths}, temporary)
    temporary.replace(path)


@torch.no_grad()
def save_laws(folder: Path, head: nn.Module, say: Callable[[str], None]) -> None:
    """Writes what the target says behind every place of the answers in a folder, from its states and by its LM head. A
    file that is there is left as it is."""
    head = copy.deepcopy(head).bfloat16()
    paths = [
        path
        for path in sorted(folder.glob("states-*.safetensors"))
        if _answers(path).exists() and not _beside(path, "laws").exists()  # answers are written behind the states
    ]
    for number, path in enumerate(paths, 1):
        answers = _lengths(path)
        with safe_open(path, "pt") as file:
            states, lengths = file.get_tensor("states"), file.get_tensor("lengths").tolist()
        own = torch.cat([each[len(each) - count :] for each, count in zip(states.split(lengths), answers, strict=True)])
        law = law_of(lambda part, own=own: head(own[part]), len(own))  # type: ignore[misc]
        temporary = _beside(path, "laws").with_suffix(".tmp")
        tensors = {"tokens": law.tokens.to(torch.int32), "probabilities": law.probabilities.bfloat16()}
        save_file(tensors, temporary)
        temporary.replace(_beside(path, "laws"))
        say(f"distributions {number}/{len(paths)}")


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(path.name.replace("states", kind))


def _lengths(path: Path) -> list[int]:
    """Tokens of each answer that a file of states belongs to."""
    return [len(json.loads(line)["answer"]) for line in read_text(_answers(path)).splitlines()]


def _answers(path: Path) -> Path:
    """The answers that a file of states belongs to."""
    return _beside(path, "answers").with_suffix(".jsonl")


class StoredStates:
    """The states of a folder of conversations, read from its files when they are asked for.

    Attributes:
        target: fingerprint of the model that had them.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self.target: dict[str, Any] = json.loads(read_text(folder / "config.json"))["target"]
        except (KeyError, TypeError, json.JSONDecodeError):
            raise ValueError(f"{folder / 'config.json'} is not that of `forerun train chat-data`") from None
        self._files: dict[tuple[Path, str], Any] = {}
        self._places: dict[tuple[tuple[int, ...], float], tuple[Path, int, int]] = {}
        self._laws: dict[tuple[tuple[int, ...], float], tuple[Path, int, int]] = {}
        for path in sorted(folder.glob("states-*.safetensors")):
            answers = _answers(path)
            if not answers.exists():  # it is written behind the states
                continue
            with safe_open(path, "pt") as file:
                lengths = file.get_tensor("lengths").tolist()
            lines, start, before = read_text(answers).splitlines(), 0, 0
            laws = _beside(path, "laws")
            for line, length in zip(lines, lengths, strict=True):
                each = json.loads(line)
                key, count = (tuple(each["prompt"]), each["temperature"]), len(each["answer"])
                self._places[key] = path, start, length
                if laws.exists():
                    self._laws[key] = laws, before, count
                start, before = start + length, before + count

    def of(self, conversation: Conversation) -> Tensor | None:
        """[n - 1, d] bfloat16 at the tokens of a prompt and its answer but the last; None where there are none."""
        place = self._places.get((tuple(conversation.prompt), conversation.temperature))
        return None if place is None else self._read("states", *place)

    def law_of(self, conversation: Conversation) -> Law | None:
        """The target's distributions of each token of the answer; None where there are none."""
        place = self._laws.get((tuple(conversation.prompt), conversation.temperature))
        if place is None:
            return None
        return Law(self._read("tokens", *place).long(), self._read("probabilities", *place).float())

    def _read(self, name: str, path: Path, start: int, length: int) -> Tensor:
        if (path, name) not in self._files:
            self._files[path, name] = safe_open(path, "pt").__enter__().get_slice(name)
        found: Tensor = self._files[path, name][start : start + length]
        return found
