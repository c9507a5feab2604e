"""Conversations of a model's own making, and training on them."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from toys import tiny, tiny_tokenizer

from forerun import load
from forerun.loading import load_model
from forerun.model import CausalLM
from forerun.train.chat_data import ChatRecipe, apart, code_questions, is_sound, make_chats
from forerun.train.chats import Conversation, read_chats
from forerun.train.draft import train_draft
from forerun.train.heads import HeadRecipe, train_head
from forerun.train.judged import features_of, judged
from forerun.train.lm import states_at
from forerun.train.loop import TrainConfig
from forerun.train.parts import in_parts
from forerun.train.states import StoredStates, save_states
from forerun.train.texts import of_chats, of_windows
from forerun.zoo.corpus import STRETCH

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
RECIPE = ChatRecipe(conversations=120, code=100, answer=12, shard=40)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATE
    tiny("llama", vocab=len(tokenizer), context=2048).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def chats(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("chats")
    make_chats(target, out, RECIPE, say=lambda _: None)
    return out


def conversation(question: str, split: str, text: str = "") -> Conversation:
    return Conversation(question, [1, 2, 3], [4, 5], text, 0.0, "own", split)


def test_conversations_are_the_models_own(target: str, chats: Path) -> None:
    """Each answer is what the model says behind the rendered question; half of them are greedy."""
    decoder = load(target, method="ar")
    found = [each for split in ("train", "validation", "test") for each in read_chats(chats, split)]
    summary = json.loads((chats / "summary.json").read_text())
    assert len(found) == sum(summary["conversations"].values()) == 120 - summary["dropped_as_neighbours"]
    greedy = [each for each in found if not each.temperature]
    assert len(found) // 3 < len(greedy) < len(found)
    assert decoder.tokenizer is not None
    for each in greedy[:4]:
        assert decoder.tokenizer.decode(each.prompt) == f"[user]{each.question}[end][assistant]"
        assert decoder.generate([each.prompt], max_new_tokens=12)[0].tokens == each.answer


def test_a_stopped_run_goes_on(target: str, chats: Path, tmp_path: Path) -> None:
    """Whole shards are kept; a lost one is made again as it was."""
    lines: list[str] = []
    for path in chats.iterdir():
        if path.name != "answers-00001.jsonl":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    make_chats(target, tmp_path, RECIPE, say=lines.append)
    assert sum(line.startswith("answers") for line in lines) == 1
    for name in ("answers-00001.jsonl", "train.jsonl"):
        assert (tmp_path / name).read_text() == (chats / name).read_text()
    with pytest.raises(ValueError, match="holds a run with other settings"):
        make_chats(target, tmp_path, replace(RECIPE, seed=1))


def test_answers_that_came_without_states_get_them(target: str, chats: Path, tmp_path: Path) -> None:
    """As those have that are unpacked from an archive."""
    for path in chats.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    make_chats(target, tmp_path, RECIPE, say=lambda _: None)
    paths = sorted(chats.glob("*.safetensors"))
    assert {path.name.partition("-")[0] for path in paths} == {"states", "laws"}
    for path in paths:
        found, whole = load_file(tmp_path / path.name), load_file(path)
        assert found.keys() == whole.keys()
        for name in found:
            close = 0.02 if path.name.startswith("states") else 0.01  # bfloat16
            if name != "tokens":  # neighbours may change places
                torch.testing.assert_close(found[name].float(), whole[name].float(), atol=close, rtol=close)


def test_a_model_that_asks_nothing_is_refused(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.train.chat_data.is_sound", lambda _: False)
    with pytest.raises(ValueError, match="asks nothing new"):
        make_chats(target, tmp_path, replace(RECIPE, code=50), say=lambda _: None)


def test_neighbours_of_held_out_questions_are_dropped() -> None:
    long = "Which of the two rivers is longer, the one in the north or the one in the south, and by how many miles?"
    held = conversation(f"Hello. {long}", "test")
    near = [conversation(f"{long} Please.", "train"), conversation("?", "validation", text=f"You ask: {long}")]
    far = [conversation(long[: STRETCH - 1], "train"), conversation("And the hills?", "validation")]
    every = [*near, held, *far]
    kept, dropped = apart(every, [(each.question, "own", each.split) for each in every])
    assert dropped == 2 and {each.question for each in kept} == {held.question, *(each.question for each in far)}


@pytest.mark.parametrize(
    ("text", "sound"),
    [
        ("What is the capital of France?", True),
        ("Hi", False),
        ("a b " * 100, False),
        ("12 + 34 = 46, 57 - 29 = 28", False),
        ("What is \x00 this for anyway", False),
    ],
)
def test_rubbish(text: str, sound: bool) -> None:
    assert is_sound(text) == sound


def test_code_questions_keep_their_files_split() -> None:
    found = list(code_questions(400))
    assert len({text for text, _ in found}) == 400 and {split for _, split in found} == {"train", "validation", "test"}


def test_texts_know_where_drafts_meet_them() -> None:
    texts = of_chats([conversation("?", "train"), replace(conversation("?", "train"), answer=[6, 7, 8, 9])])
    assert texts.tokens.tolist() == [[1, 2, 3, 4, 5, 0, 0], [1, 2, 3, 6, 7, 8, 9]]
    # Behind tokens 3 and 4 stand 4 and 5; behind 5 nothing is asked for.
    assert texts.met().int().tolist() == [[0, 0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0]]
    assert texts.met(1).int().tolist() == [[0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0]]
    assert texts.take(torch.tensor([0])).tokens.shape == (1, 4)
    assert texts.frequencies(10).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    windows = of_windows(torch.arange(12).view(2, 6).numpy())
    assert windows.met(2).all() and windows.met(2).shape == (2, 4)


def test_batches_are_of_a_length() -> None:
    rows = [replace(conversation("?", "train"), answer=[1] * length) for length in range(1, 101)]
    texts = of_chats(rows)
    for step in range(20):
        chosen = texts.batch(0, step, 8)
        assert len(set(chosen.tolist())) == 8 and torch.equal(chosen, texts.batch(0, step, 8))
        ends = texts.ends[chosen]
        assert ends.max() - ends.min() < 32
    assert len({int(each) for step in range(200) for each in texts.batch(0, step, 8)}) > 95


@pytest.mark.parametrize("kind", ["lyanna", "eagle"])
def test_heads_learn_from_conversations(kind: str, target: str, chats: Path, tmp_path: Path) -> None:
    recipe = HeadRecipe(steps=30, batch=4, unroll=2, lr=1e-2)
    found = train_head(target, [], tmp_path / "head", recipe, kind, hot=0.5, chats=chats, say=lambda _: None)
    log = [json.loads(line) for line in (tmp_path / "head/work/training/head/log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"] and len(found["survival"]) == 2


def test_a_draft_learns_from_conversations(target: str, chats: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    config = TrainConfig(steps=30, batch=4, length=1024, lr=1e-2, warmup=5, compile=False)
    train_draft(target, [], tmp_path / "draft", config, chats=chats, layers=1, width=64, say=lines.append)
    log = [json.loads(line) for line in (tmp_path / "draft/work/draft/log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"] and any("agreement on held-out answers" in line for line in lines)
    assert load_model(tmp_path / "draft", "draft", device="cpu").config.num_hidden_layers == 1


@pytest.mark.parametrize(("data", "given"), [([], False), (["text"], True)])
def test_one_source_is_given(data: list[str], given: bool, target: str, chats: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {"chats": chats if given else None}
    with pytest.raises(ValueError, match="give --data or --chats"):
        train_head(target, data, tmp_path / "head", HeadRecipe(), **more)


def test_states_are_those_that_the_target_had(
    target: str, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So training asks the target for none of them; where a file is lost it does."""
    judge = CausalLM(load_model(target, "target"))
    conversations = read_chats(chats, "train")
    texts = of_chats(conversations, 1024, StoredStates(chats))
    for row in range(0, len(texts), 7):
        (_, wanted, law), found = features_of(judge, texts.take(torch.tensor([row])).tokens), texts.states(row)
        assert found is not None
        torch.testing.assert_close(found.float(), wanted[0], rtol=1e-2, atol=1e-2)
        places = torch.arange(int(texts.begins[row]), int(texts.ends[row]))
        known = judged(judge, texts)(torch.tensor([row]))
        own, kept = known.law(places), texts.law(row)
        assert kept is not None and torch.equal(own.tokens, kept.tokens) and len(own.tokens) == len(places)
        torch.testing.assert_close(own.probabilities, law(places).probabilities, rtol=5e-2, atol=3e-2)
    asked: list[int] = []
    monkeypatch.setattr(
        "forerun.train.judged.features_of",
        lambda judge, tokens, feature: asked.append(len(tokens)) or features_of(judge, tokens, feature),
    )
    judged(judge, texts)(torch.arange(8))
    assert not asked
    for path in chats.iterdir():
        if path.name != "states-00001.safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    lacking = of_chats(conversations, 1024, StoredStates(tmp_path))
    missing = [row for row in range(len(lacking)) if lacking.states(row) is None]
    assert 0 < len(missing) < len(lacking)
    asked.clear()
    recall = judged(judge, lacking)
    recall(torch.tensor(missing[:2]))
    recall(torch.tensor([*missing[:2], 0]))
    assert asked == [2]


def test_states_at_places_lead_to_their_logits() -> None:
    model = tiny("llama")
    tokens = torch.randint(model.config.vocab_size, (2, 7))
    places = torch.rand(2, 7) < 0.5
    found = model.get_output_embeddings()(states_at(model, tokens, places))
    torch.testing.assert_close(found, model(input_ids=tokens).logits[places])


def test_a_loss_in_parts_has_the_gradients_of_the_whole() -> None:
    """By the states and by what the loss uses beside them; without gradients it is the same number."""
    maker = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=maker) for shape in ((300, 4), (5, 4)))
    found = []
    for parts in (True, False):
        states, own = x.clone().requires_grad_(), weight.clone().requires_grad_()

        def loss(rows: Tensor, chosen: slice, own: Tensor = own) -> Tensor:
            return (rows @ own.T).logsumexp(-1).sum()

        wide = states * 2
        value = in_parts(wide, loss, 300) if parts else loss(wide, slice(None)) / 300
        value.backward()
        found.append((value.detach(), states.grad, own.grad))
        with torch.no_grad():
            torch.testing.assert_close(in_parts(wide, loss, 300), value)
    torch.testing.assert_close(found[0], found[1])


def test_what_a_stopped_run_has_made_can_be_trained_on(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def stop(path: Path, states: list[Tensor]) -> None:
        if made:
            raise KeyboardInterrupt
        made.append(path)
        save_states(path, states)

    monkeypatch.setattr("forerun.train.chat_data.save_states", stop)
    with pytest.raises(KeyboardInterrupt):
        make_chats(target, tmp_path, RECIPE, say=lambda _: None)
    assert 0 < len(read_chats(tmp_path, "train")) <= RECIPE.shard
