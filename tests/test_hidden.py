"""Heads that draft from hidden states: their arithmetic, what they say, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import p_value, random_head, tiny, tiny_tokenizer

from forerun import Decoder
from forerun.draft import Draft
from forerun.drafters.lyanna import LyannaDrafter, grow
from forerun.loading import load_head
from forerun.methods import Lyanna, method
from forerun.model import CausalLM
from forerun.nn.hidden import hot_set
from forerun.runtime.hidden import HiddenLM, head_rows
from forerun.train.hidden import Recipe, train_hidden

PROMPTS = [[5, 6, 7, 5, 6], [9], list(range(2, 40)), [3, 3, 3]]


def features_of(target: CausalLM, tokens: list[int]) -> Tensor:
    with torch.no_grad(), target.hearing():
        target.model(input_ids=torch.tensor([tokens]))
    assert target.hidden is not None
    return target.hidden[0]


@pytest.mark.parametrize("layers", [1, 2])
def test_drafting_goes_on_as_it_was_trained(layers: int) -> None:
    """States behind every place of a text, drafted from a cache, are those of the unrolled training pass."""
    target = CausalLM(tiny("llama"))
    head = random_head(target, num_hidden_layers=layers)
    tokens = [5, 6, 7, 8, 9, 1, 2, 3]
    features = features_of(target, tokens)
    with torch.no_grad():
        unrolled = head.unrolled(features[None], None, torch.tensor([tokens]), 4)
        table = head.table()
    fast = HiddenLM(head, target)
    fast.start(2)
    for end in range(1, 5):
        state = fast.extend([features[end - 1 : end], features[:0]])
        lengths = list(fast.cache.lengths)
        assert lengths == [end, 0]
        for k in range(1, 5):
            torch.testing.assert_close(state[0], unrolled[k - 1][0][0, end - 1], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(unrolled[k - 1][1][0, end - 1], table[tokens[end - 1 + k]])
            state = fast.extend([state[:1], features[:0]])
        fast.crop(lengths)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
def test_the_heads_rows(architecture: str) -> None:
    target = CausalLM(tiny(architecture))
    tokens = torch.tensor([3, 1, 7])
    weight, bias = head_rows(target, tokens)
    features = features_of(target, [1, 2, 3])
    torch.testing.assert_close(features @ weight.T + bias, target.head(features)[:, tokens], rtol=1e-4, atol=1e-5)


WAYS = {
    "chain": Lyanna(reuse="off"),
    "free": Lyanna(depth=5, least=1),
    "add": Lyanna(depth=5, reuse="add"),
    "tree": Lyanna(width=3, nodes=7, reuse="off"),
    "tree, free": Lyanna(depth=5, width=2, nodes=9, least=1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gemma3"])
def test_equality_on_real_models(architecture: str, way: str) -> None:
    target = tiny(architecture)
    decoder = Decoder(target, None, None, WAYS[way], guard=False, head=random_head(CausalLM(target)))
    for prompts in (PROMPTS, PROMPTS * 4):
        plain = Decoder(target, method=method("ar")).generate(prompts, max_new_tokens=24, ignore_eos=True)
        done = decoder.generate(prompts, max_new_tokens=24, ignore_eos=True)
        assert [row.tokens for row in done] == [row.tokens for row in plain]
        assert sum(row.stats.drafted for row in done) > 0
    assert decoder.generate(PROMPTS[1], max_new_tokens=24, ignore_eos=True).tokens == plain[1].tokens


def test_reused_logits_are_those_of_the_earlier_step() -> None:
    target = tiny("llama")
    seen: list[tuple[int, Tensor, str]] = []

    class Watched(LyannaDrafter):
        def observe(self, seqs: Any, drafts: list[Draft], verdicts: Any, hidden: Tensor | None) -> None:
            (own,) = self.said
            length = len(seqs[0].tokens) - verdicts[0].accepted - 1  # of the text that the draft stood behind
            if own is not None:
                seen.append((length, own.clone(), drafts[0].origins[0]))
            super().observe(seqs, drafts, verdicts, hidden)

    head = HiddenLM(random_head(CausalLM(target)), CausalLM(target))
    drafter = Watched(head, 5, 1, 5, "free", least=1)
    from forerun.decode import Generation, decode

    seq = Generation([5, 6, 7, 5, 6], 60)
    for _ in decode(CausalLM(target), drafter, [seq]):
        pass
    made, reused = None, 0
    for length, own, origin in seen:
        if origin == "draft":
            made = (length, own)
        else:
            assert made is not None
            torch.testing.assert_close(own, made[1][length - made[0] :])
            reused += 1
    assert reused > 3
    # And those of the earlier step are what the head says from the text as it was then.
    length, own, _ = next(each for each in seen if each[2] == "draft" and each[0] > 10)
    fresh = head.fresh()
    fresh.start(1)
    features = features_of(CausalLM(target), seq.tokens[: length - 1])
    state, states = fresh.extend([features]), []
    for _ in range(5):
        states.append(state[0])
        state = fresh.extend([state])
    torch.testing.assert_close(own, head.logits(torch.stack(states)), rtol=1e-3, atol=1e-4)


def test_a_tree_holds_the_best_paths() -> None:
    """Against an enumeration of all paths, where the beams are wide enough to miss none."""
    target = CausalLM(tiny("llama"))
    head = HiddenLM(random_head(target, hot=4), target)
    head.table = head.table * 3
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    values: dict[tuple[int, ...], float] = {(5,): 0.0}
    for depth in range(3):
        for path in [path for path in values if len(path) == depth + 1]:
            law = (logits[depth] + head.table[path[-1]]).log_softmax(-1)
            values |= {(*path, head.hot[i]): values[path] + float(law[i]) for i in range(4)}
    best = sorted((path for path in values if len(path) > 1), key=lambda path: -values[path])[:9]
    draft = grow(5, logits, head, 16, 9, "draft")
    assert {tuple(draft.tokens[i] for i in draft.path(node)) for node in range(1, len(draft))} == set(best)
    chain = grow(5, logits, head, 1, 9, "draft")
    assert chain.is_chain and chain.drafted == 3


def test_what_loading_refuses(tmp_path: Path) -> None:
    target = CausalLM(tiny("llama"))
    head = random_head(target)
    head.save_pretrained(tmp_path / "head")
    assert torch.equal(load_head(tmp_path / "head", target, "lyanna").hot, head.hot)
    with pytest.raises(ValueError, match="belongs to another target"):
        load_head(tmp_path / "head", CausalLM(tiny("qwen3")), "lyanna")
    with pytest.raises(ValueError, match="of the kind 'lyanna'; the method needs 'eagle'"):
        load_head(tmp_path / "head", target, "eagle")
    with pytest.raises(ValueError, match=r"there is no .*config\.json"):
        load_head(tmp_path / "nothing", target, "lyanna")
    with pytest.raises(ValueError, match="needs a head: train one with `forerun train lyanna`"):
        Decoder(target, method=Lyanna())
    head.hot[0] = target.vocab_size
    with pytest.raises(ValueError, match="hot set that does not fit"):
        load_head(head, target, "lyanna")
    config = tmp_path / "head" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"widht": 3}))
    with pytest.raises(ValueError, match="unknown field 'widht'"):
        load_head(tmp_path / "head", target, "lyanna")


def test_hot_sets() -> None:
    tokens, share = hot_set([1, 5, 0, 3, 5], 3)
    assert tokens.tolist() == [1, 4, 3] and share == pytest.approx(13 / 14)
    for size in (0, 6):
        with pytest.raises(ValueError, match=f"1 to 5 tokens, not {size}"):
            hot_set([1, 5, 0, 3, 5], size)


def test_settings_are_checked() -> None:
    wrong: dict[str, Any] = {"depth": 0, "width": 0, "nodes": 0, "least": 0, "weight": -1, "reuse": "never"}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            method("lyanna", **{name: value})


@pytest.mark.parametrize("kind", ["lyanna", "eagle", "medusa"])
def test_training_learns_and_resumes(kind: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    target = tiny("llama", vocab=len(tokenizer))
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "text.txt").write_text("def add(a, b): return a + b\nthe cat sat on the mat\n" * 40)
    data = [str(tmp_path / "text.txt")]
    recipe = Recipe(sequences=32, prompt=8, output=24, steps=40, batch=4, unroll=3, lr=1e-2, held=0.2)
    said: list[str] = []

    def run(out: str, steps: int) -> dict[str, Any]:
        return train_hidden(
            str(tmp_path / "target"),
            data,
            tmp_path / out,
            replace(recipe, steps=steps),
            kind,
            work=tmp_path / "work",
            say=said.append,
        )

    found = run("whole", 40)
    log = [json.loads(line) for line in (tmp_path / "work/training/whole/log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"]
    assert 0 < found["coverage"] <= 1 and found["survival"][0] >= found["survival"][-1]
    judge = CausalLM(tiny("llama", vocab=len(tokenizer)))
    head = load_head(tmp_path / "whole", judge, kind)
    assert head.config.hot_size == round(0.25 * len(tokenizer))
    checkpoint = tmp_path / "work/training/whole/checkpoint.safetensors"
    before = {name: value.clone() for name, value in head.state_dict().items()}
    (tmp_path / "work/training/again").mkdir()
    for name in ("config.json", "settings"):
        source = tmp_path / "work/training/whole" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / "work/training/again" / name)
    shutil.copy(checkpoint, tmp_path / "work/training/again")
    run("again", 40)
    assert any("resuming again at step 40" in line for line in said)
    for name, value in load_head(tmp_path / "again", judge, kind).state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_drawn_tree_keeps_the_law() -> None:
    """Point masses from any head: the first tokens' joint law is the target's, by chi-square."""
    target = tiny("llama", vocab=6)
    model = CausalLM(target)
    prompt = [1, 2, 3, 4, 5, 0, 1, 2]
    way = Lyanna(depth=3, width=2, nodes=6, least=1)
    decoder = Decoder(target, None, None, way, guard=False, head=random_head(model, hot=4))
    rows = decoder.generate([prompt] * 1500, max_new_tokens=4, temperature=1.0, seed=0, ignore_eos=True)
    with torch.no_grad():
        first = target(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        pairs = target(torch.tensor([[*prompt, token] for token in range(6)])).logits[:, -1].softmax(-1)
    assert sum(row.stats.drafted for row in rows) > 1500
    assert p_value([row.tokens[:2] for row in rows], first[:, None] * pairs) > 1e-4
