"""Pools of phrases, the lookahead window, and what drafting by phrases says and costs."""

from __future__ import annotations

from collections import abc
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from toys import (
    COSTS,
    LAYERS,
    TableLM,
    decode,
    joint_distribution,
    noisy_copy,
    p_value,
    random_layer,
    random_table,
    tiny,
    tokens_of,
)

from benchmarks.baselines.lookahead import Lookahead, LookaheadDrafter
from forerun import Decoder
from forerun.engine.acceptance import Verdict
from forerun.engine.draft import Draft, Tree
from forerun.engine.engine import Engine
from forerun.engine.sequence import Request, Sequence
from forerun.heads.pre_verifier import PreVerifier
from forerun.methods import AR, Method, Ouroboros, PacerOuroboros, Parts, method, ouroboros, pools
from forerun.methods.chain import FixedLength
from forerun.methods.guard import Guarded, SpeedTracker
from forerun.methods.ouroboros import SOURCES, OuroborosDrafter
from forerun.methods.pacer import PacerStop
from forerun.methods.pools import PhrasePool
from forerun.methods.window import Window
from forerun.model.causal_lm import CausalLM
from forerun.sampling.sampler import Sampler

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
        patch.setattr(pools, "KEYS", 4)
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

    monkeypatch.setattr(pools, "save_file", interrupted)
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
    for id, prompt in enumerate(prompts):
        list(model.prefill(prompt, 8))
        model.join(id, 64)
    (logits,) = model.forward([0], [draft]).logits
    assert len(draft) > 12 and not draft.is_chain
    for node in range(len(draft)):
        plain = model.fresh()
        plain.add(0, 64)
        path = [draft.tokens[i] for i in draft.path(node)]
        expected = plain.extend([0], [[*prompts[0], *path]])[0][-1]
        torch.testing.assert_close(logits[node], expected, rtol=1e-4, atol=1e-4)


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


class Seen(OuroborosDrafter):
    """Keeps which modes were drafted by phrases and which in step, step by step."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.steps: list[tuple[list[str], list[str]]] = []

    def propose(self, seqs):
        self.steps.append(([], []))
        return super().propose(seqs)

    def _grow(self, chains, rows):
        self.steps[-1][1].extend(chain.seq.mode for chain in chains)
        return super()._grow(chains, rows)

    def _grow_by_phrases(self, chains):
        self.steps[-1][0].extend(chain.seq.mode for chain in chains)
        return super()._grow_by_phrases(chains)


def seen(requests: abc.Sequence[Request], rows: int = 2, **options) -> tuple[Seen, list[list[int]]]:
    made = drafter(pacer=True, kind=Seen, most_greedy=rows)
    return made, [tokens_of(steps) for steps in decode(TableLM(TARGET), made, requests, **options)]


def test_steps_with_many_greedy_rows_go_without_phrases() -> None:
    """Which is decided at each step; sampled and seeded rows go by phrases always."""
    sampler = Sampler(False)
    requests = [
        *(Request(PROMPT, new) for new in (9, 18, 30)),
        Request(PROMPT, 40, sampler, seed=1),
        Request(PROMPT, 40, sampler),
    ]
    made, outputs = seen(requests)
    assert made.steps[0] == (["sampled"] * 2, ["greedy"] * 3)
    for by_phrases, in_step in made.steps:
        assert "greedy" not in by_phrases or (not in_step and by_phrases.count("greedy") <= 2)
        assert set(in_step) <= {"greedy"} and len(in_step) != 2
    assert {by_phrases.count("greedy") for by_phrases, _ in made.steps} == {0, 1, 2}
    plain = [tokens_of(steps) for steps in decode(TableLM(TARGET), AR().build(Parts(TableLM(TARGET))), requests[:3])]
    assert outputs[:3] == plain
    # What a seeded row drafts and says is what it is alone.
    assert outputs[3] == seen(requests[3:4])[1][0]
    assert not made.rows and not made.policy.past and not made.model.rows


def test_a_row_keeps_its_state_between_both_ways() -> None:
    """Echoes, runs of accepted tokens and the draft's cache are those of one sequence, however it is drafted."""
    made = drafter(pacer=True, most_greedy=1)
    engine = Engine(TableLM(TARGET), made, max_rows=2)
    first = engine.add(Request(PROMPT, 60))
    ways, runs = [], []
    for turn in range(12):
        if turn == 4:
            engine.add(Request([2, 1], 6))
        engine.step()
        (seq,) = [seq for seq in engine.running if seq.id == first]
        ways.append(len(engine.running))
        runs.append(made.policy.past[first].runs)
        row = made.model.rows[first]
        assert row == seq.tokens[: len(row)] and len(row) < len(seq.tokens)
    assert 2 in ways[4:] and ways[-1] == 1
    assert made.policy.past[first].echo._known > len(PROMPT) + 5 and made.rows[first].learnt > len(PROMPT)


def test_the_policy_of_pacer_ouroboros_is_priced_by_how_rows_are_drafted() -> None:
    layer = random_layer(draft_size=4, token_size=4, target_size=4)
    chosen = PacerOuroboros(rows=3)
    parts = Parts(TableLM(TARGET), TableLM(DRAFT), layer, COSTS)
    assert chosen.costs(parts, "greedy", 4) == COSTS
    few = chosen.costs(parts, "greedy", 1)
    assert few is not None and few.draft == {1: 0.3 * COSTS.drafting(1 + 1 * 8)} and few.target == COSTS.target
    assert chosen.costs(parts, "sampled", 1) == few
    assert method("pacer").costs(parts, "greedy", 1) == COSTS  # type: ignore[union-attr]


@cache
def small_layer() -> PreVerifier:
    return random_layer(draft_size=4, token_size=4, target_size=4)


def drafter(
    width: int = 2,
    guesses: int = 3,
    suffixes: int = 2,
    pacer: bool = False,
    pool: PhrasePool | None = None,
    kind: type[OuroborosDrafter] = OuroborosDrafter,
    gamma: int = 5,
    **options,
) -> OuroborosDrafter:
    layer = small_layer() if pacer else None
    embeddings = torch.nn.Embedding(4, 4)
    return kind(
        TableLM(DRAFT),  # type: ignore[arg-type]
        PacerStop(layer, embeddings, 2, 7, costs=lambda mode, rows: COSTS) if layer else FixedLength(gamma),
        V,
        **{"width": width, "guesses": guesses, "shape": (2, 3), "suffixes": suffixes, "sources": SOURCES, "pool": pool}
        | options,
    )


@pytest.mark.parametrize("pacer", [False, True])
@pytest.mark.parametrize("batch", [1, 5])
def test_sampling_follows_the_targets_distribution(batch: int, pacer: bool) -> None:
    generator, outcomes, drafted = torch.Generator().manual_seed(0), [], 0
    for _ in range(2000 // batch):
        requests = [Request(PROMPT, 5, Sampler(False), generator=generator)] * batch
        rows = decode(TableLM(TARGET), drafter(pacer=pacer), requests)
        drafted += sum(step.drafted for steps in rows for step in steps)
        outcomes += [tokens_of(steps)[:3] for steps in rows]
    assert p_value(outcomes, joint_distribution(TARGET, PROMPT, 3, None)) > 1e-4
    assert drafted > len(outcomes)


def test_sampled_sequences_have_pools_of_their_own() -> None:
    pool = PhrasePool(2, 3)
    for made in (drafter(pool=pool), LookaheadDrafter(2, 3, 2, pool)):
        (first,) = decode(TableLM(TARGET), made, [Request(PROMPT, 12, Sampler(False), seed=3)])
        assert not len(pool)
        decode(TableLM(TARGET), made, [Request(PROMPT, 20)])
        assert len(pool) > 5
        (again,) = decode(TableLM(TARGET), made, [Request(PROMPT, 12, Sampler(False), seed=3)])
        assert tokens_of(first) == tokens_of(again) and not made.rows
        pool._phrases.clear()


def decoded(made: OuroborosDrafter, new: int = 12) -> tuple[int, int, list[int]]:
    """Forwards of the draft, drafted tokens, and the output, greedily."""
    (steps,) = decode(TableLM(TARGET), made, [Request([0], new)])
    return sum(step.draft_forwards for step in steps), sum(step.drafted for step in steps), tokens_of(steps)


def test_phrases_spare_forwards() -> None:
    """The same draft as a plain chain's, in fewer forwards the more there is to go by."""
    plain = decoded(drafter(width=0, guesses=0, suffixes=0))
    cold = decoded(drafter(width=0, suffixes=0))
    pool = PhrasePool(2, 3)
    decoded(drafter(width=0, suffixes=0, pool=pool))
    warm = decoded(drafter(width=0, suffixes=0, pool=pool))
    assert plain[0] == plain[1] == cold[1] == warm[1] and plain[2] == cold[2] == warm[2]
    assert warm[0] < cold[0] < plain[0] and len(pool) > 5


def pooled(text: abc.Sequence[int], span: int) -> PhrasePool:
    pool = PhrasePool(span, 1)
    pool.learn(text)
    return pool


def draft_text(new: int) -> list[int]:
    """What the draft would say behind the token 0, the token included."""
    (steps,) = decode(TableLM(DRAFT), AR().build(Parts(TableLM(DRAFT))), [Request([0], new)])
    return [0, *tokens_of(steps)]


@pytest.mark.parametrize("room", [3, 4, 5, 6])
def test_a_phrase_may_fill_all_the_room_but_for_the_token_of_its_forward(room: int) -> None:
    """A pool that foresaw everything: one forward drafts a phrase and a token, and what is left is one phrase more."""
    text = draft_text(12)
    made = drafter(width=0, guesses=1, suffixes=0, gamma=99, shape=(2, 1), pool=pooled(text, 2))
    seq = Sequence(Request([0], room), device="cpu")
    list(made.admit(seq, None, 8))
    proposal = made.propose([seq])
    assert proposal.drafts[0].tokens == text[:room]
    # Every forward gives 2 tokens of a phrase and 1 of its own; room - 1 tokens are wanted.
    keys = {}
    for at, key in enumerate(text[:-2]):
        keys[key] = text[at + 1 : at + 3]
    forwards, have = 0, 1
    while have < room:
        forwards += 1
        right = 0
        while right < min(2, room - have - 1) and keys[text[have - 1]][right] == text[have + right]:
            right += 1
        have += right + 1
    assert proposal.forwards == forwards


@pytest.mark.parametrize("count", [1, 2, 3])
def test_phrases_behind_a_draft_fill_all_the_room_that_is_left(count: int) -> None:
    """The draft ends `count` tokens short of what the sequence may draft; as many tokens of a phrase fit."""
    made = drafter(width=0, guesses=0, suffixes=1, gamma=2, shape=(2, 3))
    seq = Sequence(Request([0], 2 + count + 1))
    list(made.admit(seq, None, 8))
    end = draft_text(2)[-1]
    made.rows[0].pool.add(end, (1, 3))
    draft = made.propose([seq]).drafts[0]
    assert draft.tokens[3:] == [1, 3][:count] and max(draft.depths) == 2 + min(2, count)
    made.drop(seq)
    assert not made.rows and not made.model.rows


class Positions(Window):
    """A window that checks where it is planted and harvested."""

    def plant(self, tree: Tree, at: int, end: int, depth: int) -> None:
        planted.append((end, depth, [tree.tokens[node] for node in tree.draft().path(at)]))
        super().plant(tree, at, end, depth)


planted: list[tuple[int, int, list[int]]] = []


@pytest.mark.parametrize("kind", ["ouroboros", "lookahead"])
def test_the_window_stands_at_the_end_of_the_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`end` tokens of sequence and draft come before it, and as many may follow as there is room for."""
    home = "forerun.methods" if kind == "ouroboros" else "benchmarks.baselines"
    monkeypatch.setattr(f"{home}.{kind}.Window", Positions)
    made = drafter(width=3, guesses=0, suffixes=0) if kind == "ouroboros" else LookaheadDrafter(3, 2, 2)
    seq = Sequence(Request(PROMPT, 9))
    list(made.admit(seq, None, 8))
    planted.clear()
    proposal = made.propose([seq])
    drafted = proposal.drafts[0].tokens[1:] if kind == "ouroboros" else []
    text = PROMPT + drafted
    assert planted[0][:2] == (len(PROMPT), 7 if kind == "ouroboros" else 8)
    for end, depth, path in planted:
        assert text[:end][-len(path) :] == path and depth == len(PROMPT) + (8 if kind == "lookahead" else 7) - end
    assert len({end for end, _, _ in planted}) == len(planted) == (proposal.forwards or 1)


def test_guesses_of_the_window_come_true() -> None:
    """A draft model that counts: the window finds its text, and its phrases spare forwards from the second draft on."""
    size = 8
    table = torch.zeros(size, size, size)
    for last in range(size):
        table[:, last, (last + 1) % size] = 9.0
    counts = {}
    for width in (0, 4):
        made = drafter(width=width, guesses=2, suffixes=0, gamma=6, sources=())
        made.model, made.vocab_size = TableLM(table), size  # type: ignore[assignment]
        (steps,) = decode(TableLM(table), made, [Request([0, 3], 35)])
        assert tokens_of(steps) == [(4 + at) % size for at in range(35)]
        counts[width] = sum(step.draft_forwards for step in steps)
    assert counts[0] == 30 and counts[4] < 15


def test_lookahead_takes_guesses_and_makes_phrases() -> None:
    """A target that counts: without guesses nothing is accepted, without harvest phrases come from the text alone,
    which never repeats. The window counts on from tokens of the prompt, and the text gets there later."""
    size, prompt = 40, [10, 20, 30, 0]
    table = torch.zeros(size, size, size)
    for last in range(size):
        table[:, last, (last + 1) % size] = 9.0

    def decoded(width: int, pool: PhrasePool) -> tuple[int, list[int]]:
        """Forwards, and how many phrases were right before the text got there."""
        engine = Engine(TableLM(table), LookaheadDrafter(width, 2, 3, pool))
        engine.add(Request(prompt, 30))
        output, ahead = [], []
        while engine.busy:
            output += [token for step in engine.step() for token in step.tokens]
            keys = range(output[-1], size - 3)
            ahead.append(sum((key + 1, key + 2, key + 3) in pool.get(key) for key in keys))
        assert output == [1 + at for at in range(30)]
        return len(ahead), ahead

    # Phrases of a text that is known: four tokens a forward.
    warm = PhrasePool(3, 2)
    warm.learn(range(size))
    assert decoded(0, warm)[0] == 8
    assert decoded(0, PhrasePool(3, 2)) == (30, [0] * 30)
    forwards, ahead = decoded(5, PhrasePool(3, 2))
    assert forwards < 25 and max(ahead) >= 10


class SeenVerdicts(FixedLength):
    def __init__(self) -> None:
        super().__init__(4)
        self.seen: list[tuple[int, bool]] = []

    def observe(self, seqs, drafts, verdicts, hidden) -> None:
        self.seen += [(verdict.accepted, verdict.rejected) for verdict in verdicts]


def test_the_targets_verdict_becomes_phrases() -> None:
    made = drafter(width=0, guesses=0, suffixes=2)
    made.sources, made.policy = ("rejected", "suffixes"), SeenVerdicts()
    seq = Sequence(Request([0, 1], 38))
    list(made.admit(seq, None, 8))
    row = made.rows[0]
    row.pool.add(3, (1, 1))

    def draft() -> Draft:
        return made._with_suffixes(ouroboros._Phrased(seq, 9, [2, 2, 2, 3]))

    first = draft()
    assert first.tokens == [1, 2, 2, 2, 3, 1, 1] and first.origins[-2:] == ["phrase"] * 2

    def verdict(accepted: int) -> Verdict:
        return Verdict(list(range(accepted + 1)), 0, accepted + 1, True, [10 + node for node in range(7)])

    made.observe([seq], [first], [verdict(1)], None)
    # From the rejected token on: the target's token behind each; and behind the end as well.
    assert row.pool.get(2) == [(13, 14), (12, 13)] and row.pool.get(3) == [(14, 15)]
    assert made.policy.seen == [(1, True)]
    made.observe([seq], [Draft.root(1)], [Verdict([0], 0, 0, False, [5])], None)  # a step that drafted nothing
    made.observe([seq], [draft()], [verdict(4)], None)
    assert made.policy.seen[2] == (4, False)  # the phrase was rejected, not the chain


def test_a_guard_and_a_layer_that_sees_the_target() -> None:
    """The guard then shows what became of steps that it left without a draft."""
    target = tiny("llama")
    small = noisy_copy(target, 0.03)
    layer = random_layer(target, small, inputs=("confidence", "target"))
    method = PacerOuroboros(block=2, threshold=0.1)
    plain = Decoder(target, method=AR()).generate([5, 6, 7, 5, 6], max_new_tokens=60, ignore_eos=True)
    made = method.build(Parts(CausalLM(target), CausalLM(small), layer))
    turns = iter([False, True] * 60)
    pace = SpeedTracker()
    pace.drafts = lambda rows: next(turns)  # type: ignore[method-assign]
    (steps,) = decode(CausalLM(target), Guarded(made, pace), [Request([5, 6, 7, 5, 6], 60)])
    assert tokens_of(steps) == plain.tokens
    assert {step.drafted > 0 for step in steps} == {True, False}


def test_tokens_that_the_draft_lacks() -> None:
    """Phrases with such are not for it, behind the chain they may be."""
    target, draft = random_table(6, 3, 1.3), random_table(4, 4, 1.3)
    generator, outcomes, wild = torch.Generator().manual_seed(0), [], False
    for _ in range(1500):
        made = drafter(width=0)
        made.model, made.vocab_size = TableLM(draft), 6  # type: ignore[assignment]
        engine, tokens = Engine(TableLM(target), made), []
        engine.add(Request(PROMPT, 6, Sampler(False), generator=generator))
        while engine.busy:
            for row in made.rows.values():
                wild = wild or any(max(phrase) > 3 for key in range(6) for phrase in row.pool.get(key))
            tokens += [token for step in engine.step() for token in step.tokens]
        outcomes.append(tokens[:3])
    assert wild and p_value(outcomes, joint_distribution(target, PROMPT, 3, None)) > 1e-4


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
    # What is sampled may not depend on what came before.
    sampled = [made[0].generate(text, max_new_tokens=20, temperature=1.0, seed=3).tokens for _ in range(2)]
    assert sampled[0] == sampled[1]
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
    with pytest.raises(ValueError, match="'ar' does not keep phrases"):
        Decoder(target, method=method("ar")).save_phrases(path)


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
            Lookahead(**options)
