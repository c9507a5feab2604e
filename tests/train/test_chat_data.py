"""Conversations of a model's own making, and training on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.training.chats import ChatRecipe, Question, apart, is_sound, make_chats
from benchmarks.training.code_questions import questions
from forerun import load
from forerun.api.decoder import Decoder
from forerun.api.loading import load_model
from forerun.train.corpus import STRETCH
from forerun.train.draft import DraftRecipe, train_draft
from forerun.train.head import HeadRecipe, train_head
from forerun.train.texts import Conversation, of_chats, of_windows, read_chats
from tests.support.recipes import losses, make_run, save_pair
from tests.support.toys import refuses

RECIPE = ChatRecipe(conversations=120, answer=12, shard=40)
GIVEN = list(questions(120))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_pair(tmp_path_factory.mktemp("pair"), context=2048)[0]


@pytest.fixture(scope="module")
def chats(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("chats")
    make_chats(target, out, RECIPE, given=GIVEN, say=lambda _: None)
    return out


def conversation(question: str, split: str, text: str = "") -> Conversation:
    return Conversation(question, [1, 2, 3], [4, 5], text, 0.0, "own", split)


@pytest.mark.slow
def test_conversations_are_the_models_own(target: str, chats: Path) -> None:
    """Each answer is the model's own after the rendered question; half of them are greedy."""
    decoder = load(target, method="ar")
    every = [chat for split in ("train", "validation", "test") for chat in read_chats(chats, split)]
    summary = json.loads((chats / "summary.json").read_text())
    assert (
        len(every)
        == sum(summary["conversations"].values())
        == 120 - summary["dropped_as_neighbours"]
    )
    greedy = [chat for chat in every if not chat.temperature]
    assert len(every) // 3 < len(greedy) < len(every)
    assert decoder.tokenizer is not None
    for chat in greedy[:4]:
        assert decoder.tokenizer.decode(chat.prompt) == f"[user]{chat.question}[end][assistant]"
        assert decoder.generate([chat.prompt], max_new_tokens=12)[0].tokens == chat.answer


@pytest.mark.slow
def test_a_stopped_run_goes_on(
    target: str, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has made can be trained on. In the end all is as if it had not been stopped."""
    lines = list[str]()
    asked = list[int]()
    generate = Decoder.generate

    def stopped(self: Decoder, *args: Any, **more: Any) -> Any:
        asked.append(1)
        if len(asked) == 3:  # each file has greedy and sampled answers
            raise KeyboardInterrupt
        return generate(self, *args, **more)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Decoder, "generate", stopped)
        make_chats(target, tmp_path, RECIPE, given=GIVEN, say=lines.append)
    assert 0 < len(read_chats(tmp_path, "train")) <= RECIPE.shard
    make_chats(target, tmp_path, RECIPE, given=GIVEN, say=lines.append)
    assert sum(line.startswith("answers") for line in lines) == 3
    for name in ("answers-00000.jsonl", "answers-00001.jsonl", "train.jsonl"):
        assert (tmp_path / name).read_text() == (chats / name).read_text()
    refuses(
        "holds a run with other settings", make_chats, target, tmp_path, RECIPE, given=GIVEN[1:]
    )


def test_questions_are_mostly_words(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsound = "Hi", "a b " * 100, "12 + 34 = 46, 57 - 29 = 28", "What is \x00 this for anyway"
    assert is_sound("What is the capital of France?") and not any(map(is_sound, unsound))
    monkeypatch.setattr("benchmarks.training.chats.is_sound", lambda _: False)
    refuses(
        "asks nothing new",
        make_chats,
        target,
        tmp_path,
        RECIPE,
        given=GIVEN[:60],
        say=lambda _: None,
    )


def test_neighbours_of_held_out_questions_are_dropped() -> None:
    long = (
        "Which of the two rivers is longer, the one in the north or the one in the south, "
        "and by how many miles?"
    )
    held = conversation(f"Hello. {long}", "test")
    near = [
        conversation(f"{long} Please.", "train"),
        conversation("?", "validation", text=f"You ask: {long}"),
    ]
    far = [conversation(long[: STRETCH - 1], "train"), conversation("And the hills?", "validation")]
    every = [*near, held, *far]
    kept, dropped = apart(every, [Question(chat.question, "own", chat.split) for chat in every])
    assert dropped == 2 and {chat.question for chat in kept} == {
        held.question,
        *(chat.question for chat in far),
    }


def test_texts_know_where_drafts_begin() -> None:
    texts = of_chats(
        [conversation("?", "train"), replace(conversation("?", "train"), answer=[6, 7, 8, 9])]
    )
    assert texts.tokens.tolist() == [[1, 2, 3, 4, 5, 0, 0], [1, 2, 3, 6, 7, 8, 9]]
    # After tokens 3 and 4 stand 4 and 5; after 5 nothing is asked for.
    assert texts.counted().int().tolist() == [[0, 0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0]]
    assert texts.counted(1).int().tolist() == [[0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0]]
    assert texts.take(torch.tensor([0])).tokens.shape == (1, 4)
    assert texts.frequencies(10).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    windows = of_windows(torch.arange(12).view(2, 6).numpy())
    assert windows.counted(2).all() and windows.counted(2).shape == (2, 4)


def test_batches_are_of_a_length() -> None:
    rows = [replace(conversation("?", "train"), answer=[1] * length) for length in range(1, 101)]
    texts = of_chats(rows)
    for step in range(20):
        chosen = texts.batch(0, step, 8)
        assert len(set(chosen.tolist())) == 8 and torch.equal(chosen, texts.batch(0, step, 8))
        ends = texts.ends[chosen]
        assert ends.max() - ends.min() < 32
    assert len({int(each) for step in range(200) for each in texts.batch(0, step, 8)}) > 95


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lyanna", "eagle"])
def test_heads_learn_from_conversations(
    kind: str, target: str, chats: Path, tmp_path: Path
) -> None:
    run = make_run(target, tmp_path / "head", chats)
    recipe = HeadRecipe(kind=kind)
    results = train_head(
        run, replace(recipe, steps=30, batch=4, unroll=2, lr=1e-2, hot=0.5, copied=False)
    )
    assert losses(run)[-1] < losses(run)[0] and len(results["survival"]) == 2
    for given, message in (
        (run, "give --data or --chats, not both"),
        (replace(run, chats=None), "--chats$"),
    ):
        refuses(message, train_head, replace(given, data=["text"] if given.chats else []), recipe)


@pytest.mark.slow
def test_a_draft_learns_from_conversations(target: str, chats: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    run = make_run(target, tmp_path / "draft", chats, say=lines.append)
    train_draft(run, DraftRecipe(length=1024, layers=1, width=64, steps=30, batch=4, lr=1e-2))
    assert losses(run)[-1] < losses(run)[0] and any(
        "agreement on held-out output" in line for line in lines
    )
    assert load_model(tmp_path / "draft", "draft", device="cpu").config.num_hidden_layers == 1
    assert f'"chats": "{chats.name}"' in (tmp_path / "draft/README.md").read_text()
