"""Pools of phrases, the lookahead window, and what drafting by phrases says and costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import (
    COSTS,
    LAYERS,
    TableLM,
    joint_law,
    noisy_copy,
    p_value,
    random_layer,
    random_table,
    tiny,
)

from forerun import Decoder
from forerun.decode import Generation, decode
from forerun.draft import Draft, Tree
from forerun.drafters import ouroboros, phrases
from forerun.drafters.guard import Guarded, Pace
from forerun.drafters.ouroboros import OuroborosDrafter
from forerun.drafters.phrases import PhrasePool
from forerun.drafters.window import Window
from forerun.lengths import FixedLength
from forerun.lengths.pacer import PacerStop
from forerun.methods import AR, Lookahead, Method, Ouroboros, PacerOuroboros, Parts, method
from forerun.methods.phrases import SOURCES
from forerun.model import CausalLM
from forerun.sampling import Sampler, Verdict

V = 4
TARGET, DRAFT = random_table(V, 1, 1.3), random_table(V, 2, 1.3)
PROMPT = [0, 1, 2, 3, 2, 1, 0, 1]


def contents(pool: PhrasePool) -> dict[int, list[tuple[int, ...]]]:
    return {key: pool.get(key) for key in range(20) if pool.get(key)}


@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 1), min_size=3, max_size=3)), max_size=60),
    st.integers(1, 4),
)
def test_a_pool_keeps_the_newest(puts: list[tuple[int, list[int]]], most: int) -> None:
    """Against a log that is read backwards."""
    pool = PhrasePool(3, most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phrases, "KEYS", 4)
        for key, phrase in puts:
            pool.add(key, phrase)
    recent = list(dict.fromkeys(key for key, _ in reversed(puts)))
    for key in range(6):
        mine = list(dict.fromkeys(tuple(phrase) for own, phrase in reversed(puts) if own == key))
        if key not in recent[:4]:
            assert pool.get(key) == []
        elif recent.index(key) < 4 and len(recent) <= 4:  # a key that was thrown out and came back has lost its past
            assert pool.get(key) == mine[:most] and pool.get(key, 1) == mine[:1]
    assert len(pool) == sum(map(len, contents(pool).values())) <= 4 * most


def test_a_text_is_learnt_as_it_grows() -> None:
    text = Random(0).choices(range(9), k=50)
    whole, parts = PhrasePool(4, 3), PhrasePool(4, 3)
    assert whole.learn(text) == 46
    at = 0
    for end in (2, 10, 11, 30, 50):
        at = parts.learn(text[:end], at)
    assert contents(parts) == contents(whole) and whole.get(text[45])[0] == tuple(text[46:50])
    whole.drop(text[45], text[46:50])
    assert tuple(text[46:50]) not in whole.get(text[45])


def test_a_pool_is_saved_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PhrasePool(2, 3)
    pool.learn(Random(1).choices(range(9), k=40))
    path = tmp_path / "deep" / "pool.safetensors"
    pool.save(path, 9)
    again = PhrasePool.load(path, 9)
    assert contents(again) == contents(pool) and (again.span, again.most) == (2, 3)
    before = path.read_bytes()

    def interrupted(tensors: dict, where: Path, about: dict) -> None:
        Path(where).write_bytes(before[:20])
        raise KeyboardInterrupt

    monkeypatch.setattr(phrases, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.save(path, 9)
    assert path.read_bytes() == before and [each.name for each in path.parent.iterdir()] == [path.name]


def test_files_that_are_no_pools(tmp_path: Path) -> None:
    pool = PhrasePool(2, 3)
    pool.learn([1, 2, 3, 4, 5])
    path = tmp_path / "pool"
    pool.save(path, 9)
    with pytest.raises(ValueError, match="for 9 tokens, not 10"):
        PhrasePool.load(path, 10)
    with pytest.raises(ValueError, match="cannot read"):
        PhrasePool.load(tmp_path / "nothing", 9)
    cut = tmp_path / "cut"
    cut.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="no file of phrases, or a part of one"):
        PhrasePool.load(cut, 9)
    other = tmp_path / "other"
    save_file(load_file(path), other)
    with pytest.raises(ValueError, match="its format is None"):
        PhrasePool.load(other, 9)
    wild = PhrasePool(2, 3)
    wild.add(7, (8, 99))
    wild.save(path, 9)
    with pytest.raises(ValueError, match="damaged"):
        PhrasePool.load(path, 9)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 9), st.integers(0, 10_000))
def test_the_window_is_a_tree_of_its_columns(width: int, span: int, depth: int, seed: int) -> None:
    window = Window(width, span, range(100, 200), Random(seed))
    rows = [list(row) for row in window.rows]
    tree = Tree(Draft.chain(1, [2]))
    window.plant(tree, 1, 100, depth)
    draft = tree.draft()
    spelt = {tuple(draft.tokens[i] for i in draft.path(node)) for node in range(len(draft))}
    columns = min(width, max(0, depth - span + 1))
    paths = [(1, 2, *rows[0][: j + 1], *(row[j] for row in rows[1:])) for j in range(columns)]
    assert spelt == {(1, 2)[:n] for n in (1, 2)} | {path[:n] for path in paths for n in range(3, len(path) + 1)}
    assert max(draft.depths) <= 1 + max(depth, 0)
    best = [1000 + node for node in range(len(draft))]
    answers = [best[node] for node in window.nodes]
    found = window.harvest(best)
    assert found == [(path[2 + j], [*path[3 + j :], answers[j]]) for j, path in enumerate(paths)]
    if columns:
        assert window.rows[:-1] == rows[1:] and window.rows[-1][:columns] == answers


def test_guesses_keep_their_places_in_the_text() -> None:
    window = Window(4, 2, [0], Random(0))
    window.rows = [[2, 3, 4, 5], [3, 4, 5, 6]]  # of the text 1 2 3 4 5 ..
    tree = Tree(Draft.root(1))
    window.plant(tree, 0, 1, 9)
    assert window.harvest([token + 1 for token in tree.tokens])[0] == (2, [3, 4])
    assert window.rows == [[3, 4, 5, 6], [4, 5, 6, 7]]
    window.plant(Tree(Draft.root(4)), 0, 4, 9)
    assert window.rows == [[5, 6, 0, 0], [6, 7, 0, 0]]
    window.plant(Tree(Draft.root(3)), 0, 3, 9)  # a draft that was rejected
    assert window.rows == [[0, 5, 6, 0], [0, 6, 7, 0]]
    window.plant(Tree(Draft.root(0)), 0, 50, 9)
    assert window.rows == [[0] * 4] * 2


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gemma3"])
def test_a_window_says_what_plain_forwards_say(architecture: str) -> None:
    """Positions and masks: the logits of every node are those of a plain forward over its path."""
    model = CausalLM(tiny(architecture))
    tree = Tree(Draft.chain(5, [6]))
    for phrase in ([7, 8, 9], [7, 8, 4], [3, 8, 9]):
        tree.branch(1, phrase, "phrase")
    Window(3, 3, range(40), Random(0)).plant(tree, 1, 6, 9)
    draft = tree.draft()
    prompts = [[1, 2, 3, 4], [9, 8, 7, 6, 5, 4, 3]]
    model.start(prompts)
    logits = model.forward([draft, None])[0]
    assert len(draft) > 12 and not draft.is_chain
    for node in range(len(draft)):
        plain = model.fresh()
        plain.start([[]])
        path = [draft.tokens[i] for i in draft.path(node)]
        torch.testing.assert_close(logits[node], plain.extend([[*prompts[0], *path]])[0][-1], rtol=1e-4, atol=1e-4)


WAYS: dict[str, Method] = {
    "ouroboros": Ouroboros(window=2, guesses=3, ngram=3, suffixes=2, gamma=5),
    "no window": Ouroboros(window=0, guesses=2, ngram=4, suffixes=0, gamma=7),
    "window alone": Ouroboros(window=3, guesses=2, ngram=3, suffixes=1, gamma=4, sources=""),
    "pacer-ouroboros": PacerOuroboros(window=2, ngram=3, suffixes=2, most=9, rows=4),
    "pacer-ouroboros, too many rows": PacerOuroboros(most=9),
    "lookahead": Lookahead(3, 3, 3),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gemma3", "mistral"])
def test_equality_on_real_models(architecture: str, way: str) -> None:
    """Batch 1 and 4, with cold pools and warm ones."""
    target = tiny(architecture)
    small = noisy_copy(target, 0.03)
    name = WAYS[way].name
    layer = random_layer(target, small, **LAYERS[name]) if name in LAYERS else None
    prompts = [[5, 6, 7, 5, 6], [9], list(range(2, 40)), [3, 3, 3]]
    plain = Decoder(target).generate(prompts, max_new_tokens=24, ignore_eos=True)
    decoder = Decoder(target, None, small, WAYS[way], guard=False, pre_verifier=layer)
    decoder.costs = COSTS
    for _ in range(2):
        done = decoder.generate(prompts, max_new_tokens=24, ignore_eos=True)
        assert [row.tokens for row in done] == [row.tokens for row in plain]
        assert sum(row.stats.drafted for row in done) > 0
        one = decoder.generate(prompts[2], max_new_tokens=24, ignore_eos=True)
        assert one.tokens == plain[2].tokens
    (pool,) = decoder.pools.values()
    assert len(pool) > 20


def test_wide_greedy_batches_go_without_phrases(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Seen(OuroborosDrafter):
        def start(self, seqs: Sequence[Generation], hidden: Tensor | None = None) -> None:
            made.append(len(seqs))
            super().start(seqs, hidden)

    monkeypatch.setattr(ouroboros, "OuroborosDrafter", Seen)
    target = tiny("llama")
    small = noisy_copy(target, 0.03)
    layer = random_layer(target, small)
    decoder = Decoder(target, None, small, PacerOuroboros(rows=2), guard=False, pre_verifier=layer)
    for count in (1, 2, 3):
        for temperature in (0.0, 1.0):
            decoder.generate([[5, 6]] * count, max_new_tokens=4, temperature=temperature, seed=0)
    assert made == [1, 1, 2, 2, 3]  # where tokens are drawn, rows draft as they would alone


def drafter(
    width: int = 2, guesses: int = 3, suffixes: int = 2, pacer: bool = False, pool: PhrasePool | None = None
) -> OuroborosDrafter:
    layer = random_layer(draft_size=4, token_size=4, target_size=4) if pacer else None
    embeddings = torch.nn.Embedding(4, 4)
    return OuroborosDrafter(
        TableLM(DRAFT),  # type: ignore[arg-type]
        lambda: PacerStop(layer, embeddings, 2, 7, costs=COSTS) if layer is not None else FixedLength(5),
        V,
        width=width,
        guesses=guesses,
        shape=(2, 3),
        suffixes=suffixes,
        sources=SOURCES,
        pool=pool,
    )


@pytest.mark.parametrize("pacer", [False, True])
@pytest.mark.parametrize(("batch", "warm"), [(1, False), (5, False), (1, True)])
def test_sampling_follows_the_targets_law(batch: int, warm: bool, pacer: bool) -> None:
    generator, outcomes, drafted = torch.Generator().manual_seed(0), [], 0
    pool = PhrasePool(2, 3) if warm else None
    for _ in range(2000 // batch):
        seqs = [Generation(list(PROMPT), len(PROMPT) + 5, Sampler(False), generator=generator) for _ in range(batch)]
        for steps in decode(TableLM(TARGET), drafter(pacer=pacer, pool=pool), seqs):  # type: ignore[arg-type]
            drafted += sum(step.drafted for step in steps)
        outcomes += [seq.output[:3] for seq in seqs]
    assert p_value(outcomes, joint_law(TARGET, PROMPT, 3, None)) > 1e-4
    assert drafted > len(outcomes)


def decoded(made: OuroborosDrafter, new: int = 12) -> tuple[int, int, list[int]]:
    """Forwards of the draft, drafted tokens, and the output, greedily."""
    seq = Generation([0], 1 + new)
    steps = [step for batch in decode(TableLM(TARGET), made, [seq]) for step in batch]  # type: ignore[arg-type]
    return sum(step.draft_forwards for step in steps), sum(step.drafted for step in steps), seq.output


def test_phrases_spare_forwards() -> None:
    """The same draft as a plain chain's, in fewer forwards the more there is to go by."""
    plain = decoded(drafter(width=0, guesses=0, suffixes=0))
    cold = decoded(drafter(width=0, suffixes=0))
    pool = PhrasePool(2, 3)
    decoded(drafter(width=0, suffixes=0, pool=pool))
    warm = decoded(drafter(width=0, suffixes=0, pool=pool))
    assert plain[0] == plain[1] == cold[1] == warm[1] and plain[2] == cold[2] == warm[2]
    assert warm[0] < cold[0] < plain[0] and len(pool) > 5


class Seen(FixedLength):
    def __init__(self) -> None:
        super().__init__(4)
        self.seen: list[tuple[int, bool]] = []

    def observe(self, drafts: list[Draft], verdicts: list[Verdict], hidden: Tensor | None) -> None:
        self.seen += [(verdict.accepted, verdict.rejected) for verdict in verdicts]


def test_the_targets_verdict_becomes_phrases() -> None:
    made = drafter(width=0, guesses=0, suffixes=2)
    made.sources = ("rejected", "suffixes")
    seq = Generation([0, 1], 40)
    made.start([seq])
    (row,) = made.rows
    row.policy = Seen()
    row.pool.add(3, (1, 1))
    row.tokens = [2, 2, 2, 3]
    draft = made._with_suffixes(row, seq)
    assert draft.tokens == [1, 2, 2, 2, 3, 1, 1] and draft.origins[-2:] == ["phrase"] * 2

    def verdict(accepted: int) -> Verdict:
        return Verdict(list(range(accepted + 1)), 0, accepted + 1, True, [10 + node for node in range(7)])

    made.observe([seq], [draft], [verdict(1)], None)
    # From the rejected token on: what the target would have said behind each; and behind the end as well.
    assert row.pool.get(2) == [(13, 14), (12, 13)] and row.pool.get(3) == [(14, 15)]
    assert row.policy.seen == [(1, True)]
    made.observe([seq], [Draft.root(1)], [Verdict([0], 0, 0, False, [5])], None)  # a step that drafted nothing
    row.tokens = [2, 2, 2, 3]
    made._with_suffixes(row, seq)
    made.observe([seq], [draft], [verdict(4)], None)
    assert row.policy.seen[2] == (4, False)  # the phrase was rejected, not the chain


def test_a_guard_and_a_layer_that_sees_the_target() -> None:
    """The guard then shows what became of steps that it left without a draft."""
    target = tiny("llama")
    small = noisy_copy(target, 0.03)
    layer = random_layer(target, small, inputs=("confidence", "target"))
    method = PacerOuroboros(block=2, threshold=0.1)
    decoder = Decoder(target, None, small, method, guard=False, pre_verifier=layer)
    plain = Decoder(target, method=AR()).generate([5, 6, 7, 5, 6], max_new_tokens=60, ignore_eos=True)
    made = method.build(Parts(decoder.target.fresh(), decoder.draft.fresh(), layer))
    turns = iter([False, True] * 60)
    pace = Pace()
    pace.drafts = lambda rows: next(turns)  # type: ignore[method-assign]
    seq = Generation([5, 6, 7, 5, 6], 65)
    steps = [step for batch in decode(decoder.target.fresh(), Guarded(made, pace), [seq]) for step in batch]
    assert seq.output == plain.tokens
    assert {step.drafted > 0 for step in steps} == {True, False}


def test_tokens_that_the_draft_lacks() -> None:
    """Phrases with such are not for it, behind the chain they may be."""
    target, draft = random_table(6, 3, 1.3), random_table(4, 4, 1.3)
    generator, outcomes = torch.Generator().manual_seed(0), []
    pool = PhrasePool(2, 3)
    for _ in range(1500):
        seq = Generation(list(PROMPT), len(PROMPT) + 6, Sampler(False), generator=generator)
        made = drafter(width=0, pool=pool)
        made.model, made.vocab_size = TableLM(draft), 6  # type: ignore[assignment]
        for _ in decode(TableLM(target), made, [seq]):  # type: ignore[arg-type]
            pass
        outcomes.append(seq.output[:3])
    assert any(max(phrase) > 3 for key in range(6) for phrase in pool.get(key))
    assert p_value(outcomes, joint_law(target, PROMPT, 3, None)) > 1e-4


def test_phrases_outlive_the_call_where_they_may(tmp_path: Path) -> None:
    target = tiny("llama")
    made = [
        Decoder(target, None, noisy_copy(target, 0.03), Ouroboros(warm=warm), guard=False) for warm in (True, False)
    ]
    text = [5, 6, 7, 5, 6]
    first, second = [made[0].generate(text, max_new_tokens=40).stats.draft_forwards for _ in range(2)]
    assert second < first
    assert len({made[1].generate(text, max_new_tokens=40).stats.draft_forwards for _ in range(2)}) == 1
    assert not made[1].pools
    # What is drawn may not depend on what came before.
    drawn = [made[0].generate(text, max_new_tokens=20, temperature=1.0, seed=3).tokens for _ in range(2)]
    assert drawn[0] == drawn[1]
    path = tmp_path / "phrases"
    made[0].save_phrases(path)
    again = Decoder(target, None, noisy_copy(target, 0.03), Ouroboros(), guard=False)
    again.read_phrases(path)
    assert again.generate(text, max_new_tokens=40).stats.draft_forwards == second
    other = Decoder(target, None, noisy_copy(target, 0.03), Ouroboros(ngram=3))
    with pytest.raises(
        ValueError, match=r"have 4 tokens, 1 for each token at most; method 'ouroboros' is set to \(2, 1"
    ):
        other.read_phrases(path)
    with pytest.raises(ValueError, match="'lookup' does not keep phrases"):
        Decoder(target, method=method("lookup")).save_phrases(path)


def test_settings_are_checked() -> None:
    wrong = {"window": -1, "guesses": -1, "ngram": 1, "suffixes": -1, "gamma": 0, "sources": "prompts"}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            method("ouroboros", **{name: value})
    for options in ({"block": 0}, {"share": 2.0}, {"ngram": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            method("pacer-ouroboros", **options)
    for options in ({"window": -1}, {"guesses": 0}, {"ngram": 1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            method("lookahead", **options)
