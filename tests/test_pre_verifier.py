"""The pre-verifier: its arithmetic, its files, the drafts it learns from, and the policy that asks it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
    tiny_tokenizer,
)

from forerun import Decoder
from forerun.costs import Costs
from forerun.decode import Generation, decode
from forerun.drafters.chain import ChainDrafter
from forerun.drafters.plain import PlainDrafter
from forerun.lengths import Look
from forerun.lengths.pacer import BLOCKS, SCORES, PacerStop, best_threshold
from forerun.loading import load_pre_verifier
from forerun.methods import Pacer, SpecDec, method
from forerun.model import CausalLM
from forerun.nn.echo import SIZES, Echo
from forerun.nn.pre_verifier import INPUTS
from forerun.nn.quick import Array, QuickPreVerifier
from forerun.sampling import Sampler
from forerun.train.pre_verifier import Recipe, auc, loss_of, train_pre_verifier
from forerun.train.rollout import history, roll_out


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def inputs(rows: int, depth: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "log_q": -random(rows, depth).abs(),
        "echoes": random(rows, depth, len(SIZES)).sign(),
        "hidden": random(rows, depth, 32),
        "embedded": random(rows, depth, 32),
    }


@pytest.mark.parametrize("kind", ["survival", "acceptance"])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_block_by_block_is_the_same_as_at_once(layers: int, kind: str) -> None:
    layer = random_layer(layers=layers, kind=kind, inputs=INPUTS, depth=7)
    given, target, runs = inputs(3, 10), torch.randn(3, 32), torch.rand(3, 3) * 9
    with torch.no_grad():
        logits, survival, _ = layer.step(layer.begin(target, runs), **given)
        state, parts = layer.begin(target, runs), []
        for at in (0, 1, 5, 8):
            until = {0: 1, 1: 5, 5: 8, 8: 10}[at]
            said, alive, state = layer.step(state, **{name: value[:, at:until] for name, value in given.items()})
            parts.append((said, alive))
    torch.testing.assert_close(torch.cat([said for said, _ in parts], 1), logits)
    torch.testing.assert_close(torch.cat([alive for _, alive in parts], 1), survival)
    if kind == "acceptance":
        torch.testing.assert_close(survival, logits.sigmoid().cumprod(-1))


def test_rows_go_their_own_ways() -> None:
    layer = random_layer(inputs=INPUTS)
    given, target, runs = inputs(3, 6), torch.randn(3, 32), torch.rand(3, 3)
    with torch.no_grad():
        whole, _, _ = layer.step(layer.begin(target, runs), **given)
        first = {name: value[:, :4] for name, value in given.items()}
        _, _, state = layer.step(layer.begin(target, runs), **first)
        rest = {name: value[[2, 0], 4:] for name, value in given.items()}
        said, _, _ = layer.step(state.select(torch.tensor([2, 0])), **rest)
    torch.testing.assert_close(said, whole[[2, 0], 4:])


@pytest.mark.parametrize("kind", ["survival", "acceptance"])
@pytest.mark.parametrize("layers", [0, 2])
def test_the_quick_layer_says_the_same(layers: int, kind: str) -> None:
    layer = random_layer(layers=layers, kind=kind, inputs=INPUTS, depth=7)
    with torch.no_grad():
        layer.place.normal_()
        for name, weight in layer.named_parameters():
            if name.endswith("bias"):
                weight.normal_()
    quick = QuickPreVerifier(layer)
    given, target, runs = inputs(3, 10), torch.randn(3, 32), torch.rand(3, 3) * 9
    plain, fast = layer.begin(target, runs), quick.begin(target, runs.tolist())
    for first, last in ((0, 1), (1, 5), (5, 10)):
        part = {name: value[:, first:last] for name, value in given.items()}
        with torch.no_grad():
            logits, survival, plain = layer.step(plain, **part)
        said, fast = quick.step(fast, **part | {name: part[name].tolist() for name in ("log_q", "echoes")})
        expected = survival if kind == "acceptance" else logits
        torch.testing.assert_close(torch.from_numpy(said), expected, rtol=1e-4, atol=1e-5)
        rows = [2, 0, 1]
        plain, fast = plain.select(torch.tensor(rows)), fast.select(rows)
        given = {name: value[rows] for name, value in given.items()}


def test_echoes_against_a_search() -> None:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(3, (60,), generator=generator).tolist()
    echo = Echo()
    for known in (10, 11, 30, 60):
        echo.hear(text[:known])
        drafted = torch.randint(3, (9,), generator=generator).tolist()
        both = text[:known] + drafted
        expected = []
        for at in range(known, known + 9):
            row = []
            for size in SIZES:
                places = [i for i in range(size, known) if text[i - size : i] == both[at - size : at]]
                row.append((1 if text[places[-1]] == both[at] else -1) if places else 0)
            expected.append(tuple(row))
        assert echo.answers(text[known - max(SIZES) : known] if known > 6 else text[:known], drafted) == expected
        assert {value for row in expected for value in row} > {0} or known < 30


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
def test_drafts_from_many_places_are_those_of_one(architecture: str) -> None:
    """Greedy branches against plain greedy decoding of the draft, and labels against the target's own."""
    target = tiny(architecture)
    draft = noisy_copy(target, 0.04)
    prompts = [[5, 6, 7, 8], [9, 3, 2, 1]]
    plain = Decoder(target).generate(prompts, max_new_tokens=40, ignore_eos=True)
    windows = torch.tensor([prompt + done.tokens for prompt, done in zip(prompts, plain, strict=True)])
    verifying, drafting = CausalLM(target), CausalLM(draft)
    drafts = roll_out(verifying, drafting, windows, 4, 6, 5, Sampler(), torch.Generator().manual_seed(0))
    anchors = drafts.anchors.view(2, 6)
    assert all(len(set(row)) == 6 for row in anchors.tolist())
    index = 0
    for row in range(2):
        for anchor in anchors[row].tolist():
            context = windows[row, : anchor + 1].tolist()
            said = Decoder(draft).generate(context, max_new_tokens=5, ignore_eos=True)
            assert drafts.tokens[index].tolist() == said.tokens
            right = [a == b for a, b in zip(said.tokens, windows[row, anchor + 1 : anchor + 6].tolist(), strict=True)]
            assert drafts.accept[index].tolist() == [float(each) for each in right]
            drafting.keeps_hidden = verifying.keeps_hidden = True
            drafting.start([context[:-1]])
            drafting.extend([[context[-1], *said.tokens[:-1]]])
            assert drafting.hidden is not None
            torch.testing.assert_close(drafts.hidden[index], drafting.hidden[0], rtol=1e-3, atol=1e-3)
            verifying.start([context[:-2]])
            verifying.extend([context[-2:]])
            assert verifying.hidden is not None
            torch.testing.assert_close(drafts.target[index], verifying.hidden[0, 0], rtol=1e-3, atol=1e-3)
            index += 1
    assert 0 < float(drafts.accept.mean()) < 1


def test_acceptance_of_drawn_drafts() -> None:
    target = tiny("llama")
    draft = noisy_copy(target, 0.05)
    windows = torch.randint(2, 60, (2, 30), generator=torch.Generator().manual_seed(3))
    sampler = Sampler(False)
    verifying, drafting = CausalLM(target), CausalLM(draft)
    drafts = roll_out(verifying, drafting, windows, 5, 4, 3, sampler, torch.Generator().manual_seed(0))
    for index, anchor in enumerate(drafts.anchors.tolist()):
        row = index // 4
        text = torch.tensor([[*windows[row, : anchor + 1].tolist(), *drafts.tokens[index].tolist()]])
        with torch.no_grad():
            p, q = (model(text).logits[0, anchor:-1].softmax(-1) for model in (target, draft))
        ratio = (p / q).gather(-1, drafts.tokens[index][:, None])[:, 0].clamp(max=1)
        torch.testing.assert_close(drafts.accept[index], ratio, rtol=1e-3, atol=1e-4)


def test_history_by_hand() -> None:
    kept = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 0, 1, 1]]).bool()
    found = history(kept, 1, torch.tensor([[0, 1, 2, 5, 7, 9]]))
    assert found[0].tolist() == [[0, 4, 4], [1, 4, 4], [0, 1, 4], [3, 1, 4], [0, 0, 3], [2, 0, 3]]


def test_auc_by_hand() -> None:
    assert auc(torch.tensor([0.1, 0.4, 0.6, 0.9]), torch.tensor([0.0, 1.0, 0.0, 1.0])) == 0.75


def test_loss_by_hand() -> None:
    logits, accept = torch.tensor([[0.3, -1.0, 2.0]]), torch.tensor([[1.0, 0.0, 1.0]])
    right, wrong = (-logits.sigmoid().log(), -(1 - logits.sigmoid()).log())
    survival = (right[0, 0] + 3 * wrong[0, 1] + 3 * wrong[0, 2]) / 3  # behind a rejection nothing survives
    torch.testing.assert_close(loss_of(random_layer(), logits, accept, 3.0), survival)
    acceptance = (right[0, 0] + 3 * wrong[0, 1]) / 2
    torch.testing.assert_close(loss_of(random_layer(kind="acceptance"), logits, accept, 3.0), acceptance)


def stop(rule: str, block: int | None, seed: int = 0, most: int = 9, **settings) -> PacerStop:
    layer = random_layer(seed=seed, draft_size=4, token_size=4, **settings)
    embeddings = torch.nn.Embedding(4, 4)
    if rule == "auto":
        return PacerStop(layer, embeddings, block, most, rho=1.05, costs=COSTS)
    return PacerStop(layer, embeddings, block, most, 0.45, 1.05, rule)


def test_how_much_of_a_block_is_certain() -> None:
    policy = stop("last", 4, most=10)
    policy.start([Generation([1], 30)])
    assert [policy.certain([0], depth) for depth in range(10)] == [4, 3, 2, 1, 4, 3, 2, 1, 2, 1]


RULES = ["last", "mean", "min", "auto"]
V, NEW, JOINT = 4, 5, 3
TARGET, DRAFT = random_table(V, 1), random_table(V, 1) + 0.5 * random_table(V, 2)
PROMPT = [0, 1, 2, 3, 2, 1, 0, 1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block", [1, 2, 4])
def test_sampling_follows_the_targets_law(rule: str, block: int) -> None:
    """2000 rows at once, which stop on their own."""
    seqs = [
        Generation(list(PROMPT), len(PROMPT) + NEW, Sampler(False), generator=torch.Generator().manual_seed(row))
        for row in range(2000)
    ]
    drafter = ChainDrafter(TableLM(DRAFT), stop(rule, block, inputs=("confidence", "history", "echoes"), layers=1))
    steps = [step for batch in decode(TableLM(TARGET), drafter, seqs) for step in batch]
    assert len({step.drafted for step in steps}) > 1
    assert p_value([seq.output[:JOINT] for seq in seqs], joint_law(TARGET, PROMPT, JOINT, None)) > 1e-4


@pytest.mark.parametrize("rule", RULES)
def test_greedy_rows_are_what_they_are_alone(rule: str) -> None:
    prompts = [[0], [1, 2, 3], [3, 3], PROMPT]
    limits = [7, 30, 18, 25]

    def seqs() -> list[Generation]:
        return [Generation(list(p), len(p) + n, index=i) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))]

    plain = seqs()
    list(decode(TableLM(TARGET), PlainDrafter(), plain))
    together = seqs()
    lengths: dict[int, list[int]] = {}
    for batch in decode(TableLM(TARGET), ChainDrafter(TableLM(DRAFT), stop(rule, 2)), together):
        for step in batch:
            lengths.setdefault(step.index, []).append(step.drafted)
    assert [seq.output for seq in together] == [seq.output for seq in plain]
    if rule == "auto":  # prices depend on the number of rows
        return
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        alone = [Generation(list(prompt), len(prompt) + limit)]
        steps = [
            step for b in decode(TableLM(TARGET), ChainDrafter(TableLM(DRAFT), stop(rule, 2)), alone) for step in b
        ]
        assert [step.drafted for step in steps] == lengths[index]


def test_it_stops_where_the_layer_says() -> None:
    """Every stop recomputed from the whole draft at once, on real models, with every input."""
    target = tiny("llama")
    draft = CausalLM(noisy_copy(target, 0.03))
    layer = random_layer(seed=4, inputs=INPUTS)
    asked: list[tuple[int, list[float]]] = []

    class Watching(PacerStop):
        def _ask(self, look: Look) -> Array:
            said = super()._ask(look)
            asked.append((look.depth, (1 / (1 + np.exp(-said[0]))).tolist()))
            return said

    policy = Watching(layer, draft.model.get_input_embeddings(), 3, 12, 0.48)
    seq = Generation([5, 6, 7], 103)
    stopped = []
    for (step,) in decode(CausalLM(target), ChainDrafter(draft, policy), [seq]):
        if seq.room < 20:  # the end is near and cuts drafts
            break
        *before, last = asked
        assert [depth for depth, _ in asked] == list(range(3, 3 * len(asked) + 1, 3))
        assert all(survival[-1] >= 0.48 for _, survival in before)
        assert step.drafted == last[0]
        assert last[1][-1] < 0.48 or step.drafted == 12
        stopped.append(step.drafted)
        asked.clear()
    assert len(set(stopped)) > 1


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_automatic_threshold_is_the_best(score: str, rows: int) -> None:
    """Against a replay, draft by draft."""
    traces = np.random.default_rng(0).random((40, 11)).astype(np.float32) ** 0.3
    traces = traces.cumprod(-1)
    block, rho = 2, 1.1

    batches = traces[:, None]
    if rows > 1:
        batches = traces[np.random.default_rng(0).integers(40, size=(40, rows))]

    def rate(threshold: float) -> float:
        tokens = spent = 0.0
        for said in batches:  # [rows, 11]
            done = 0
            while done + block <= 11:
                done += block
                part = said[:, done - block : done]
                value = {"last": part[:, -1], "mean": part.mean(-1), "min": part.min(-1)}[score]
                if value.mean() < threshold * rho ** (done // block - 1):
                    break
            tokens += 1 + said[:, :done].sum() / rows
            spent += done * COSTS.drafting(rows) + COSTS.verify(rows * (done + 1)) + COSTS.policy * (done // block)
        return tokens / spent

    found, tokens_per_ms = best_threshold(traces, block, rho, SCORES[score], COSTS, rows)
    assert rate(found) >= max(rate(threshold) for threshold in np.linspace(0.02, 0.98, 97)) * 0.99
    assert rate(found) > 1.02 * min(rate(0.02), rate(0.98))
    assert tokens_per_ms == pytest.approx(rate(found) * rows, rel=1e-4)


def test_the_automatic_block_is_the_best() -> None:
    policy = stop("auto", None)
    policy.start([Generation([1], 9)])
    last = SCORES["last"]
    said, _ = policy.layer.traces["greedy"][..., :9]
    rates = {block: best_threshold(said, block, 1.05, last, COSTS) for block in BLOCKS}
    assert policy.block == max(rates, key=lambda block: rates[block][1]) and policy.cheap is None
    assert policy.threshold == rates[policy.block][0]
    policy = PacerStop(random_layer(draft_size=4), torch.nn.Embedding(4, 4), None, 9, threshold=0.5)
    policy.start([Generation([1], 9)])
    assert (policy.block, policy.threshold) == (4, 0.5)


@pytest.mark.parametrize("cheap", [False, True])
def test_rows_with_costs_stop_together(cheap: bool) -> None:
    """By the mean of all rows, of which those that have ended count as 0; drawn rows and fixed thresholds do not."""
    layer = random_layer(draft_size=4)
    costs = replace(COSTS, policy=50.0, glance=0.01)

    def started(mode: Sampler, **settings: Any) -> PacerStop:
        policy = PacerStop(layer, torch.nn.Embedding(4, 4), None if cheap and "costs" in settings else 1, 9, **settings)
        policy.start([Generation([1], 9, mode) for _ in range(4)])
        policy.threshold = 0.5
        assert (policy.cheap is not None) == (cheap and "costs" in settings)
        if policy.cheap is not None:
            policy.cheap.threshold = 0.5
        else:
            policy._ask = lambda look: np.log(survival[:, None] / (1 - survival[:, None]))  # type: ignore[method-assign]
        return policy

    for survival, going in (([0.9, 0.8, 0.4, 0.1], True), ([0.9, 0.8, 0.1, 0.1], False), ([0.9, 0.8], False)):
        survival, count = np.array(survival), len(survival)
        scores = torch.from_numpy(np.log(np.stack([1 - survival, survival, 0 * survival + 1e-30], 1)))
        look = Look(list(range(count)), [[1]] * count, scores)
        assert started(Sampler(), costs=costs).more(look) == [going] * count
        alone = [bool(each >= 0.5) for each in survival]
        assert started(Sampler(), threshold=0.5).more(look) == alone
        assert started(Sampler(greedy=False), costs=costs).more(look) == alone


def test_a_layer_that_does_not_pay_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its calls are dear, or the draft's own probabilities tell as much, these decide."""
    layer = random_layer(draft_size=4)
    for price, cheap in ((0.0, False), (50.0, True)):
        costs = replace(COSTS, policy=price, glance=0.01)
        policy = PacerStop(layer, torch.nn.Embedding(4, 4), None, 9, costs=costs)
        policy.start([Generation([1], 9)])
        assert (policy.cheap is not None) is cheap
        if cheap:
            assert policy.cheap.threshold == policy.threshold
            monkeypatch.setattr(policy, "_ask", None)
            wide = Look([0], [[2]], torch.tensor([[0.0, 0.0, 9.0, 0.0]]))
            narrow = Look([0], [[2, 1]], torch.tensor([[0.0, -9.0, 9.0, 0.0]]))
            assert [policy.more(look) for look in (wide, narrow)] == [[True], [False]]


def test_dear_drafts_are_shorter() -> None:
    traces = (0.9 ** torch.arange(1, 33)).expand(512, -1).numpy()

    dear = Costs(COSTS.target, {1: 3.0})
    free = Costs({1: 4.0}, {1: 0.0})
    shortest, longest = (best_threshold(traces, 1, 1.0, SCORES["last"], costs)[0] for costs in (dear, free))
    assert longest < 0.1 < 0.8 < shortest


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CausalLM, CausalLM]:
    target = tiny("llama")
    draft = noisy_copy(target, 0.03)
    folder = tmp_path_factory.mktemp("layer")
    layer = random_layer(target, draft)
    layer.config.recipe = {"target": "T", "draft": "D"}
    layer.save_pretrained(folder)
    return folder, CausalLM(target), CausalLM(draft)


def test_files_come_back(trained: tuple[Path, CausalLM, CausalLM]) -> None:
    folder, target, draft = trained
    loaded = load_pre_verifier(folder, target, draft)
    for name, value in random_layer().state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors"}
    other_type = CausalLM(noisy_copy(target.model, 0).to(torch.bfloat16))
    assert load_pre_verifier(folder, other_type, draft)


def test_each_mistake_has_its_own_message(trained: tuple[Path, CausalLM, CausalLM], tmp_path: Path) -> None:
    folder, target, draft = trained

    def broken(name: str, change) -> Path:  # type: ignore[no-untyped-def]
        copy = tmp_path / name
        copy.mkdir()
        for path in folder.iterdir():
            (copy / path.name).write_bytes(path.read_bytes())
        change(copy)
        return copy

    def truncate(copy: Path) -> None:
        weights = copy / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])

    def add_field(copy: Path) -> None:
        settings = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(settings | {"widht": 3}))

    with pytest.raises(ValueError, match="belongs to another draft: it was trained for 'D'"):
        load_pre_verifier(folder, target, CausalLM(noisy_copy(target.model, 0.03, seed=1)))
    with pytest.raises(ValueError, match="belongs to another target"):
        load_pre_verifier(folder, CausalLM(tiny("qwen3")), draft)
    with pytest.raises(ValueError, match="cannot load the pre-verifier"):
        load_pre_verifier(broken("truncated", truncate), target, draft)
    with pytest.raises(ValueError, match="unknown field 'widht'"):
        load_pre_verifier(broken("field", add_field), target, draft)
    with pytest.raises(ValueError, match=r"there is no .*config\.json"):
        load_pre_verifier(tmp_path / "nothing", target, draft)
    with pytest.raises(ValueError, match="needs a pre-verifier"):
        Decoder(target, None, draft, Pacer())


@pytest.mark.parametrize("method", [Pacer(), Pacer(block=4, threshold=0.5, score="mean"), SpecDec()])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gemma3"])
def test_equality_on_real_models(architecture: str, method: Pacer | SpecDec) -> None:
    target = tiny(architecture)
    draft = noisy_copy(target, 0.03)
    layer = random_layer(target, draft, **LAYERS[method.name])
    prompts = [[5, 6, 7, 5, 6], [9], list(range(2, 40))]
    plain = Decoder(target).generate(prompts, max_new_tokens=24, ignore_eos=True)
    decoder = Decoder(target, None, draft, method, guard=False, pre_verifier=layer)
    decoder.costs = COSTS
    done = decoder.generate(prompts, max_new_tokens=24, ignore_eos=True)
    assert [row.tokens for row in done] == [row.tokens for row in plain]
    assert sum(row.stats.drafted for row in done) > 0
    one = decoder.generate(prompts[0], max_new_tokens=24, ignore_eos=True)
    assert one.tokens == plain[0].tokens


def test_settings_are_checked() -> None:
    assert method("pacer", threshold=None).needs_costs
    for options in ({"block": 0}, {"threshold": 2.0}, {"score": "max"}, {"most": 0}, {"rho": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            method("pacer", **options)


def test_drawn_rows_do_not_depend_on_their_neighbours_or_ends() -> None:
    def sampled(rows: list[int]) -> list[list[int]]:
        seqs = [
            Generation(
                list(PROMPT),
                len(PROMPT) + 5 + 3 * row,
                Sampler(False),
                generator=torch.Generator().manual_seed(7 + row),
            )
            for row in rows
        ]
        drafter = ChainDrafter(TableLM(DRAFT), stop("auto", None))
        for _ in decode(TableLM(TARGET), drafter, seqs):
            pass
        return [seq.output for seq in seqs]

    together = sampled(list(range(6)))
    assert together == [sampled([row])[0] for row in range(6)]


def test_training_resumes_and_its_layer_loads(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    target = tiny("llama", vocab=len(tokenizer))
    for name, model in (("target", target), ("draft", noisy_copy(target, 0.02))):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b): return a + b\n" * 200)
    recipe = Recipe(sequences=4, prompt=16, output=40, anchors=6, depth=8, drawn_depth=4, steps=6, batch=8, held=0.5)

    def run(out: str) -> None:
        train_pre_verifier(
            str(tmp_path / "target"),
            str(tmp_path / "draft"),
            [str(text)],
            tmp_path / out,
            recipe,
            say=lambda line: None,
        )

    run("whole")
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == ["README.md", "config.json", "model.safetensors", "reliability.png", "work"]
    (tmp_path / "resumed" / "work").mkdir(parents=True)
    for part in ("own-output", "config.json"):
        source, copy = tmp_path / "whole" / "work" / part, tmp_path / "resumed" / "work" / part
        shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
    (tmp_path / "resumed" / "work" / "rollouts").mkdir()
    shutil.copy(tmp_path / "whole/work/rollouts/00000.safetensors", tmp_path / "resumed/work/rollouts")
    run("resumed")
    models = [CausalLM(tiny("llama", vocab=len(tokenizer))), CausalLM(noisy_copy(target, 0.02))]
    layers = [load_pre_verifier(tmp_path / out, *models) for out in ("whole", "resumed")]
    for (name, one), (_, other) in zip(layers[0].state_dict().items(), layers[1].state_dict().items(), strict=True):
        assert torch.equal(one, other), name
    assert layers[0].greedy_traces.any() and layers[0].drawn_traces[:, :4].any()
    decoder = Decoder(*[model.model for model in models[:1]], None, models[1].model, Pacer(), pre_verifier=layers[0])
    assert decoder.generate([5, 6, 7], max_new_tokens=12).tokens


def test_what_training_refuses(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    for name, architecture, vocab in (("target", "llama", 0), ("windowed", "mistral", 0), ("padded", "llama", 8)):
        tiny(architecture, vocab=len(tokenizer) + vocab).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b): return a + b\n" * 200)
    recipe = Recipe(sequences=4, prompt=16, output=40)

    def run(draft: str, recipe: Recipe) -> None:
        folders = [str(tmp_path / name) for name in ("target", draft)]
        train_pre_verifier(*folders, [str(text)], tmp_path / "out", recipe, say=lambda line: None)

    with pytest.raises(ValueError, match="at least 2, one greedy and one drawn, not 1"):
        run("target", replace(recipe, sequences=1))
    with pytest.raises(ValueError, match="more than the target's context of 256"):
        run("target", replace(recipe, output=400))
    with pytest.raises(ValueError, match="the draft sees 16 tokens back"):
        run("windowed", recipe)
    with pytest.raises(ValueError, match="embeddings must be of one size"):
        run("padded", recipe)
