"""Drafts to train on, which are rolled out in answers."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import Decoder
from forerun.api.layers import load_pre_verifier
from forerun.api.loading import load_model
from forerun.methods import AR, Pacer
from forerun.model.causal_lm import CausalLM
from forerun.sampling.params import SamplingParams
from forerun.sampling.sampler import Sampler
from forerun.train.pre_verifier import Recipe, of_conversations, train_pre_verifier
from forerun.train.rollout import FIELDS, roll_out
from forerun.train.texts import Conversation, Texts
from tests.support.recipes import make_run, save_pair
from tests.support.toys import refuses, save_lines, save_models, tiny, tiny_tokenizer

WINDOW: Any = {"prompt": 16, "output": 40}  # of text
RECIPE = Recipe(
    sequences=12, anchors=5, depth=6, sampled_depth=4, steps=6, batch=8, held=0.5, **WINDOW
)


def conversation(
    prompt: list[int], answer: list[int], temperature: float = 0.0, split: str = "train"
) -> Conversation:
    text = tiny_tokenizer().decode(answer, skip_special_tokens=True)
    return Conversation("?", prompt, answer, text, temperature, "own", split)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair(tmp_path_factory.mktemp("pair"))


def models_of(pair: tuple[str, str]) -> list[CausalLM]:
    return [
        CausalLM(load_model(folder, part))
        for folder, part in zip(pair, ("target", "draft"), strict=True)
    ]


@pytest.fixture(scope="module")
def chats(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of different lengths by the target, every other one at temperature 1."""
    folder = tmp_path_factory.mktemp("chats")
    decoder = Decoder(load_model(pair[0], "target"), method=AR())
    for split, count in (("train", 24), ("validation", 10)):
        rows = []
        for at in range(count):
            prompt = [5 + (at * 7 + i) % 20 for i in range(3 + at % 5)]
            params = SamplingParams(
                max_new_tokens=3 + 2 * at, temperature=float(at % 2), seed=at, ignore_eos=True
            )
            rows.append(
                conversation(prompt, decoder.generate(prompt, params).tokens, float(at % 2), split)
            )
        save(rows, folder, split)
    return folder


def save(rows: list[Conversation], folder: Path, split: str) -> None:
    folder.mkdir(exist_ok=True)
    save_lines(folder / f"{split}.jsonl", map(asdict, rows))


def answers(texts: Texts) -> list[tuple[list[int], list[int]]]:
    rows = zip(texts.tokens.tolist(), texts.begins.tolist(), texts.ends.tolist(), strict=True)
    return [(row[: begin + 1], row[begin + 1 : end + 1]) for row, begin, end in rows]


def test_which_conversations_are_used(chats: Path) -> None:
    few, every = (
        of_conversations(chats, replace(RECIPE, sequences=n, held=h))
        for n, h in ((8, 0.5), (1000, 1.0))
    )
    sizes = [
        {kind: [len(part) for part in parts] for kind, parts in by_kind.items()}
        for by_kind in (few, every)
    ]
    assert sizes[0] == {"greedy": [4, 2], "sampling": [4, 2]}
    # All that are long enough: 1, 5 and 9 tokens of a draft have no place in the shortest ones.
    assert sizes[1] == {"greedy": [11, 4], "sampling": [12, 5]}
    for kind, parts in (*few.items(), *every.items()):
        for split, texts in zip(("train", "validation"), parts, strict=True):
            rows = [
                json.loads(line) for line in (chats / f"{split}.jsonl").read_text().splitlines()
            ]
            wanted = [
                (row["prompt"], row["answer"])
                for row in rows
                if row["temperature"] == float(kind != "greedy")
            ]
            assert all(
                turn in wanted and len(turn[1]) >= (6 if kind == "greedy" else 4)
                for turn in answers(texts)
            )
            assert torch.equal(texts.ends, texts.ends.sort().values)


@pytest.mark.parametrize("count", [5, None])
@pytest.mark.parametrize("greedy", [True, False])
def test_anchors_never_leave_an_answer(
    greedy: bool, count: int | None, pair: tuple[str, str], chats: Path
) -> None:
    depth = 6 if greedy else 4
    texts = of_conversations(chats, replace(RECIPE, sequences=1000))[
        "greedy" if greedy else "sampling"
    ][0]
    drafts = roll_out(
        *models_of(pair), texts, count, depth, Sampler(greedy), torch.Generator().manual_seed(0)
    )
    seen = set(zip(drafts["rows"].tolist(), drafts["anchors"].tolist(), strict=True))
    places = []
    for row, (prompt, answer) in enumerate(answers(texts)):
        places.append(len(answer) - depth + 1)  # of a draft in the answer
        own = [anchor + 1 - len(prompt) for at, anchor in seen if at == row]
        assert len(own) == (places[-1] if count is None else min(count, places[-1])) and own
        assert 0 <= min(own) <= max(own) < places[-1]
    assert len(seen) == len(drafts["accept"]) and min(places) < 5 < max(places)


def test_rows_do_not_depend_on_longer_neighbours(pair: tuple[str, str], chats: Path) -> None:
    """What pads a text is not seen."""
    models = models_of(pair)
    texts = of_conversations(chats, replace(RECIPE, sequences=1000))["greedy"][0]
    together = roll_out(*models, texts, None, 6, Sampler())
    for row in (0, 5):
        own = (part[row : row + 1] for part in (texts.tokens, texts.begins, texts.ends))
        alone = roll_out(*models, Texts(*own), None, 6, Sampler())
        mine = together["rows"] == row
        for name in (*FIELDS, "anchors"):
            torch.testing.assert_close(together[name][mine], alone[name], rtol=1e-3, atol=1e-4)


def train(
    pair: tuple[str, str],
    out: Path,
    chats: Path | None,
    recipe: Recipe = RECIPE,
    draft: str | None = None,
    **more: Any,
) -> None:
    train_pre_verifier(make_run(pair[0], out, chats, **more), draft or pair[1], recipe)


@pytest.mark.parametrize("on_text", [False, True])
def test_a_layer_learns_resumes_and_loads(
    on_text: bool, pair: tuple[str, str], chats: Path, tmp_path: Path
) -> None:
    """From conversations, or from what the target says after text."""
    given = None if on_text else chats
    train(pair, tmp_path / "whole", given)
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == ["README.md", "config.json", "model.safetensors", "work"]
    work, other = tmp_path / "whole/work", tmp_path / "resumed/work"
    kinds = ["train-greedy", "train-sampling", "validation-greedy", "validation-sampling"]
    names = [f"{kind}-00000.safetensors" for kind in kinds]
    assert sorted(path.name for path in (work / "rollouts").iterdir()) == names
    assert (work / "own-output").exists() == on_text
    shutil.copytree(work, other)
    shutil.rmtree(other / "training")
    for name in names[1:]:
        (other / "rollouts" / name).unlink()
    said: list[str] = []
    train(pair, tmp_path / "resumed", given, say=said.append)
    assert sum(line.startswith("drafts of") for line in said) == 3
    assert said[-2].startswith("warning: an AUC below 0.6 or fewer than 200 held-out drafts (")
    assert (
        f"generate --target {pair[0]} --draft {pair[1]} --method pacer --pre-verifier " in said[-1]
    )
    models = models_of(pair)
    layers = [load_pre_verifier(tmp_path / out, *models) for out in ("whole", "resumed")]
    for (name, one), (_, two) in zip(
        layers[0].state_dict().items(), layers[1].state_dict().items(), strict=True
    ):
        assert torch.equal(one, two), name
    assert layers[0].greedy_traces.any() and layers[0].drawn_traces[:, :4].any()
    recipe = layers[0].config.recipe
    assert on_text or (recipe["chats"] == chats.name and "data" not in recipe)
    decoder = Decoder(models[0].model, None, models[1].model, Pacer(), pre_verifier=layers[0])
    plain = Decoder(models[0].model, method=AR()).generate([5, 6, 7], max_new_tokens=12).tokens
    assert decoder.generate([5, 6, 7], max_new_tokens=12).tokens == plain
    # Another layer on the same drafts gathers nothing. Another number of conversations is another
    # run.
    said.clear()
    train(pair, tmp_path / "second", given, work=work, say=said.append)
    assert not any(line.startswith("drafts of") for line in said)
    with pytest.raises(ValueError, match="holds a run with other settings"):
        train(pair, tmp_path / "third", given, replace(RECIPE, sequences=14), work=work)


@pytest.mark.slow
def test_conversations_that_cannot_be_used_are_refused(
    pair: tuple[str, str], chats: Path, tmp_path: Path
) -> None:
    rows = [conversation([1] * 260, [5] * 40, float(at % 2)) for at in range(4)]
    changed = {
        "long": rows,
        "text": [replace(rows[0], text="others")],
        "ids": [replace(rows[0], answer=[49151])],
    }
    for name, own in changed.items():
        for split in ("train", "validation"):
            save(own, tmp_path / name, split)
    for name, architecture, more in (("windowed", "mistral", 0), ("padded", "llama", 8)):
        save_models(tmp_path, **{name: tiny(architecture, vocab=len(tiny_tokenizer()) + more)})
    for folder, recipe, message, *draft in (
        (tmp_path, RECIPE, "no conversations in"),
        (
            chats,
            replace(RECIPE, depth=90),
            "has no greedy answer of 90 tokens in its train conversations",
        ),
        (
            chats,
            replace(RECIPE, sequences=3),
            "sequences must be at least 4, two greedy and two sampled, not 3",
        ),
        (
            tmp_path / "long",
            RECIPE,
            "the longest conversation is 300 tokens, more than the target's context of 256",
        ),
        (tmp_path / "text", RECIPE, "are of a model with other tokens than"),
        (tmp_path / "ids", RECIPE, "are of a model with other tokens than"),
        (
            None,
            replace(RECIPE, output=400),
            "a window is 416 tokens, more than the target's context of 256",
        ),
        (None, RECIPE, "the draft sees 16 tokens back", "windowed"),
        (None, RECIPE, "embeddings must be of one size", "padded"),
    ):
        refuses(
            message,
            train,
            pair,
            tmp_path / "out",
            folder,
            recipe,
            str(tmp_path / draft[0]) if draft else None,
        )
    assert not (tmp_path / "out").exists()
