"""The pre-verifier: its arithmetic, its files, the drafts that it learns from, and its policy."""

from __future__ import annotations

import json
import shutil
from collections import abc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun import Decoder
from forerun.api.layers import load_pre_verifier
from forerun.drafters.model_chain import ChainDrafter
from forerun.drafters.pacer import BLOCKS, BlockRule, PacerStop, best_threshold
from forerun.drafters.plain import PlainDrafter
from forerun.engine.sequence import Request, Sequence
from forerun.engine.step import RowOutcome
from forerun.heads.echo import SIZES, Echo
from forerun.heads.pre_verifier import MIN_PROBABILITY, USUAL_RUN, PreVerifier
from forerun.heads.quick import Array, QuickPreVerifier
from forerun.methods import Pacer
from forerun.model.causal_lm import CausalLM
from forerun.planning.cost_model import Costs
from forerun.planning.stop_rules import DraftState, LengthPolicy, Within
from forerun.sampling.sampler import Sampler
from forerun.train.pre_verifier import auc, survival_loss
from forerun.train.rollout import history, roll_out
from forerun.train.texts import of_windows
from forerun.zoo import WEIGHTS_FOLDER
from tests.support.toys import (
    COSTS,
    PROMPT,
    TableLM,
    decode,
    fit,
    noisy_copy,
    random_layer,
    random_table,
    refuses,
    tiny,
    tokens_of,
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def inputs(rows: int, depth: int) -> dict[str, Tensor]:
    return {
        "log_q": -torch.randn(rows, depth).abs(),
        "echoes": torch.randn(rows, depth, len(SIZES)).sign(),
    }


def varied(layer: PreVerifier) -> PreVerifier:
    """The layer with weights where it starts with zeros."""
    with torch.no_grad():
        for weight in (
            layer.place,
            *(weight for name, weight in layer.named_parameters() if name.endswith("bias")),
        ):
            weight.normal_()
    return layer


@pytest.mark.parametrize("stored", [False, True])
def test_block_by_block_is_the_same_as_at_once(stored: bool) -> None:
    """NumPy's steps equal torch's forward over whole drafts.

    Rows change their places between steps.
    """
    layer = (
        PreVerifier.from_pretrained(WEIGHTS_FOLDER / "pre-verifier").eval()
        if stored
        else varied(random_layer(depth=7))
    )
    quick = QuickPreVerifier(layer)
    given = inputs(4, 10)
    runs = torch.rand(4, 3) * 9
    with torch.no_grad():
        logits, _ = layer(runs, **given)
    state = quick.begin(runs.tolist())
    rows = [0, 1, 2, 3]
    for first, last, left in ((0, 1, [2, 0, 1, 3]), (1, 5, [3, 1, 0]), (5, 8, [2, 0]), (8, 10, [])):
        output, state = quick.step(
            state, **{name: value[rows, first:last].tolist() for name, value in given.items()}
        )
        torch.testing.assert_close(
            torch.from_numpy(output), logits[rows, first:last], rtol=1e-4, atol=1e-4
        )
        state = state.select(left)
        rows = [rows[row] for row in left]
    assert quick.traces["greedy"].any() and quick.traces["sampled"].any()


def echoes_of(text: list[int], tokens: list[int]) -> list[list[int]]:
    """`Echo`, by a search of the text for every token."""
    echoes = []
    for at in range(len(text), len(text) + len(tokens)):
        both, row = text + tokens, []
        for size in SIZES:
            ends = [i for i in range(size, len(text)) if both[i - size : i] == both[at - size : at]]
            row.append((1 if text[ends[-1]] == both[at] else -1) if ends and at >= size else 0)
        echoes.append(row)
    return echoes


def test_echoes_are_those_that_a_search_finds() -> None:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(3, (60,), generator=generator).tolist()
    echo = Echo()
    for known in (10, 11, 30, 60):
        echo.read(text[:known])
        drafted = torch.randint(3, (9,), generator=generator).tolist()
        expected = echoes_of(text[:known], drafted)
        assert echo.answers(text[max(0, known - max(SIZES)) : known], drafted) == list(
            map(tuple, expected)
        )
        assert {value for row in expected for value in row} > {0} or known < 30


def logits_of(model: Any, tokens: abc.Sequence[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def rolled(
    target: Any,
    draft: Any,
    windows: Tensor,
    prompt: int,
    anchors: int,
    depth: int,
    sampler: Sampler,
) -> Any:
    texts = of_windows(windows.numpy(), prompt)
    generator = torch.Generator().manual_seed(0)
    return roll_out(CausalLM(target), CausalLM(draft), texts, anchors, depth, sampler, generator)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
def test_drafts_from_many_places_are_those_of_one(architecture: str) -> None:
    """Greedy branches equal plain greedy decoding of the draft.

    Labels are what the target says.
    """
    target = tiny(architecture)
    draft = noisy_copy(target, 0.04)
    prompts = [[5, 6, 7, 8], [9, 3, 2, 1]]
    plain = Decoder(target).generate(prompts, max_new_tokens=40, ignore_eos=True)
    windows = torch.tensor(
        [prompt + done.tokens for prompt, done in zip(prompts, plain, strict=True)]
    )
    drafts = rolled(target, draft, windows, 3, 6, 5, Sampler())
    assert all(len(set(row)) == 6 for row in drafts["anchors"].view(2, 6).tolist())
    for index, anchor in enumerate(drafts["anchors"].tolist()):
        window = windows[index // 6].tolist()
        context, after = window[: anchor + 1], window[anchor + 1 : anchor + 6]
        said = Decoder(draft).generate(context, max_new_tokens=5, ignore_eos=True)
        assert drafts["tokens"][index].tolist() == said.tokens
        assert drafts["accept"][index].tolist() == [
            float(a == b) for a, b in zip(said.tokens, after, strict=True)
        ]
    assert 0 < float(drafts["accept"].mean()) < 1


def test_acceptance_of_sampled_drafts() -> None:
    target = tiny("llama")
    draft = noisy_copy(target, 0.05)
    windows = torch.randint(2, 60, (2, 30), generator=torch.Generator().manual_seed(3))
    drafts = rolled(target, draft, windows, 4, 4, 3, Sampler(False))
    for index, anchor in enumerate(drafts["anchors"].tolist()):
        text = [*windows[index // 4, : anchor + 1].tolist(), *drafts["tokens"][index].tolist()]
        p, q = (logits_of(model, text)[anchor:-1].softmax(-1) for model in (target, draft))
        ratio = (p / q).gather(-1, drafts["tokens"][index][:, None])[:, 0].clamp(max=1)
        torch.testing.assert_close(drafts["accept"][index], ratio, rtol=1e-3, atol=1e-4)


def test_history_counts_runs_as_by_hand() -> None:
    kept = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 0, 1, 1]]).bool()
    found = history(kept, torch.tensor([0]), torch.tensor([[0, 1, 2, 5, 7, 9]]))
    assert found[0].tolist() == [[0, 4, 4], [1, 4, 4], [0, 1, 4], [3, 1, 4], [0, 0, 3], [2, 0, 3]]


def test_auc_and_loss_are_those_computed_by_hand() -> None:
    assert auc(torch.tensor([0.1, 0.4, 0.6, 0.9]), torch.tensor([0.0, 1.0, 0.0, 1.0])) == 0.75
    logits = torch.tensor([[0.3, -1.0, 2.0]])
    accept = torch.tensor([[1.0, 0.0, 1.0]])
    right = -logits.sigmoid().log()
    wrong = -(1 - logits.sigmoid()).log()
    survival = (right[0, 0] + wrong[0, 1] + wrong[0, 2]) / 3  # after a rejection nothing survives
    torch.testing.assert_close(survival_loss(logits, accept), survival)


def stop(rule: str, block: int | None) -> PacerStop:
    how: dict[str, Any] = {"costs": COSTS} if rule == "auto" else {"threshold": 0.45}
    return PacerStop(random_layer(), block, 9, **how)


RULES = ["fixed", "auto"]
TARGET = random_table(4, 1)
DRAFT = random_table(4, 1) + 0.5 * random_table(4, 2)


def table_draft(policy: LengthPolicy) -> ChainDrafter:
    return ChainDrafter(TableLM(DRAFT), policy)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block", [1, 2, 4])
def test_sampling_follows_the_targets_distribution(rule: str, block: int) -> None:
    """800 rows at once, which stop on their own."""
    policy = stop(rule, block)
    requests = [Request(PROMPT, 5, Sampler(False), seed=0, stream=row) for row in range(800)]
    rows = decode(TableLM(TARGET), table_draft(policy), requests)
    assert len({step.drafted for steps in rows for step in steps}) > 1
    assert fit(rows, TARGET) > 1e-4 and not policy.past


class Watching(PacerStop):
    """Keeps every draft with the layer's output on its tokens and where it was asked."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.step, self.layer.step = self.layer.step, self.watched
        self.asked: list[Array] = []
        self.drafts: list[tuple[int, list[int], list[float], int, bool]] = []

    def watched(self, *args: Any) -> tuple[Array, Any]:
        output, state = self.step(*args)
        self.asked.append(output[0])
        return output, state

    def observe(self, outcomes: abc.Sequence[RowOutcome]) -> None:
        super().observe(outcomes)
        output = np.concatenate(self.asked).tolist() if self.asked else []
        seq = outcomes[0].sequence
        draft = outcomes[0].draft
        verdict = outcomes[0].verdict
        self.drafts.append(
            (len(seq.tokens), draft.tokens[1:], output, verdict.accepted, verdict.rejected)
        )
        self.asked = []


def test_the_layer_is_given_what_it_is_to_see() -> None:
    """Each output of the layer can be recomputed from the text.

    The inputs are probabilities, echoes and runs of accepted tokens, recomputed by transformers'
    own forwards; torch's form of the layer gives the outputs, and each stop follows from these.
    """
    torch.manual_seed(1)
    target = tiny("llama")
    draft = noisy_copy(target, 0.03)
    layer = varied(random_layer(seed=1))
    with torch.no_grad():
        layer.leave.bias.fill_(-1.2)
    block, threshold = 3, 0.5
    policy = Watching(layer, block, 9, threshold)
    (steps,) = decode(
        CausalLM(target), ChainDrafter(CausalLM(draft), policy), [Request([5, 6, 7, 5, 6], 90)]
    )
    text = [5, 6, 7, 5, 6, *tokens_of(steps)]
    runs = [0.0, USUAL_RUN, USUAL_RUN]
    end = 5
    ends = set()
    seen = 0
    for length, tokens, output, accepted, rejected in policy.drafts:
        if end + 9 >= len(text):  # the sequence's end cuts drafts
            break
        logits = logits_of(draft, text[:end] + tokens)
        ids = torch.tensor(tokens)
        log_q = (
            logits[end - 1 : -1]
            .softmax(-1)
            .gather(-1, ids[:, None])
            .clamp(min=MIN_PROBABILITY)
            .log()
            .T
        )
        with torch.no_grad():
            echoes = torch.tensor([echoes_of(text[:end], tokens)])
            expected, survival = layer(torch.tensor([runs]), log_q, echoes)
        asked = len(output)
        assert asked == len(tokens) - len(tokens) % block - (block if len(tokens) == 9 else 0)
        torch.testing.assert_close(
            torch.tensor([output]), expected[:, :asked], rtol=2e-3, atol=2e-3
        )
        for last in range(block, asked + 1, block):
            alive = float(survival[0, last - 1])
            if abs(alive - threshold) > 1e-3:
                assert (alive < threshold) == (last == len(tokens))
        ends.add(len(tokens))
        runs[0] += accepted
        runs = [0.0, *runs[:2]] if rejected else [runs[0] + 1, *runs[1:]]
        end, seen = length, seen + asked
    assert seen > 20 and len({row[3] for row in policy.drafts}) > 1 and len(ends) > 1


@pytest.mark.parametrize("rows", [1, 3])
def test_the_automatic_threshold_is_the_best(rows: int) -> None:
    """Against a replay, draft by draft."""
    traces = np.random.default_rng(0).random((40, 11)).astype(np.float32) ** 0.3
    traces = traces.cumprod(-1)
    block = 2
    batches = (
        traces[np.random.default_rng(0).integers(40, size=(40, rows))]
        if rows > 1
        else traces[:, None]
    )

    def rate(threshold: float) -> float:
        tokens = spent = 0.0
        for said in batches:  # [rows, 11]
            done = 0
            while done + block <= 11:
                done += block
                if said[:, done - 1].mean() < threshold:
                    break
            tokens += 1 + said[:, :done].sum() / rows
            spent += (
                done * COSTS.drafting(rows)
                + COSTS.verify(rows * (done + 1))
                + COSTS.policy * (done // block)
            )
        return tokens / spent

    best, tokens_per_ms = best_threshold(traces, block, COSTS, rows)
    assert rate(best) >= max(rate(threshold) for threshold in np.linspace(0.02, 0.98, 97)) * 0.99
    assert rate(best) > 1.02 * min(rate(0.02), rate(0.98))
    assert tokens_per_ms == pytest.approx(rate(best) * rows, rel=1e-4)


def test_the_automatic_block_is_the_best() -> None:
    policy = stop("auto", None)
    for mode, traces, costs in (("greedy", "greedy", COSTS), ("sampled", "sampled", COSTS.sampled)):
        alive, products = policy.layer.traces[traces][..., :9]
        rates = {block: best_threshold(alive, block, costs) for block in BLOCKS}
        one_policy = replace(costs, policy=costs.read_prob_ms)
        rates[0] = best_threshold(alive, 1, one_policy, 1, products)
        block, threshold, _ = policy.settings(mode, 1, True)
        assert (
            block == max(rates, key=lambda block: rates[block][1]) and threshold == rates[block][0]
        )
    assert stop("fixed", None).settings("greedy", 1, True) == (4, 0.45, False)
    for count in range(1, 65):  # few numbers of rows are priced
        policy.settings("greedy", count, False)
    counts = [*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8)]
    assert [count for _, count, is_alone, _ in policy._settings if not is_alone] == counts


def test_the_automatic_threshold_goes_by_the_context() -> None:
    """Few contexts are priced, as a search takes longer than a step."""
    dear = Costs({1: 40.0, 32: 900.0}, {1: 8.0}, 0.1, context=256)
    policy = PacerStop(
        random_layer(),
        None,
        9,
        costs=replace(COSTS, context=256, far=replace(dear, context=8192)),
    )
    settings = {
        context: policy.settings("greedy", 1, True, context)
        for context in (0, 256, 8000, 8192, 8400)
    }
    assert settings[0] == settings[256] != settings[8192] == settings[8000] == settings[8400]
    assert {context for *_, context in policy._settings} == {256, 8192}


@pytest.mark.parametrize("cheap", [False, True])
def test_greedy_rows_with_costs_stop_together(cheap: bool) -> None:
    """A batch stops by the mean of all rows, in which rows that have ended count as 0.

    Sampled rows and fixed thresholds do not stop that way.
    """
    layer = random_layer()
    costs = replace(COSTS, policy=50.0, read_prob_ms=0.01)

    def more(
        survival: abc.Sequence[float], samplers: list[Sampler], rows: int = 4, **settings: Any
    ) -> list[bool]:
        by_products = cheap and "costs" in settings
        policy = PacerStop(layer, None if by_products else 1, 9, **settings)
        seqs = [Sequence(Request([1], 9, sampler), id) for id, sampler in enumerate(samplers)]
        for seq in seqs:
            policy.admit(seq)
        rule = policy.begin(seqs, rows)

        def ask(state: DraftState) -> Array:
            alive = np.array([[survival[seq.id]] for seq in state.seqs])
            return np.log(alive / (1 - alive))

        assert isinstance(rule, Within if by_products else BlockRule)
        if isinstance(rule, Within):
            rule.limits = replace(rule.limits, min_product=0.5)
        else:
            rule.threshold, rule._ask = 0.5, ask  # type: ignore[method-assign]
        scores = torch.tensor(
            [[1 - each, each, 1e-30] for each in survival], dtype=torch.float64
        ).log()
        return rule.more(DraftState(seqs, [[1]] * len(seqs), scores))

    greedy = Sampler()
    sampled = Sampler(greedy=False)
    given = {"costs": costs}
    for survival, going in (
        ([0.9, 0.8, 0.4, 0.1], True),
        ([0.9, 0.8, 0.1, 0.1], False),
        ([0.9, 0.8], False),
    ):
        count = len(survival)
        assert more(survival, [greedy] * count, **given) == [going] * count
        alone = [each >= 0.5 for each in survival]
        assert more(survival, [greedy] * count, threshold=0.5) == alone
        assert more(survival, [sampled] * count, **given) == alone
    # Of two rows, or of three with one that has no draft; and beside sampled ones each on its own.
    for other, rows, going in ((0.35, 2, True), (0.25, 2, False), (0.35, 3, False)):
        assert more([0.7, other], [greedy] * 2, rows, **given) == [going] * 2
    assert more([0.7, 0.9, 0.35, 0.2], [greedy, sampled] * 2, **given) == [True, True, False, False]


def test_files_come_back_and_each_mistake_has_its_own_message(tmp_path: Path) -> None:
    models = tiny("llama"), noisy_copy(tiny("llama"), 0.03)
    target, draft = map(CausalLM, models)
    folder = tmp_path / "layer"
    layer = random_layer(*models)
    layer.config.recipe = {"target": "T", "draft": "D"}
    layer.save_pretrained(folder)
    loaded = load_pre_verifier(folder, target, draft)
    for name, value in layer.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors"}
    other_type = CausalLM(noisy_copy(target.model, 0).to(torch.bfloat16))
    assert load_pre_verifier(folder, other_type, draft)

    def broken(name: str, weights: int | None = None, **fields: Any) -> Path:
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        (copy / "model.safetensors").write_bytes(
            (copy / "model.safetensors").read_bytes()[:weights]
        )
        settings = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(settings | fields))
        return copy

    other = CausalLM(noisy_copy(target.model, 0.03, seed=1))
    for path, models, message in (
        (folder, (target, other), "belongs to another draft: it was trained for 'D'"),
        (folder, (CausalLM(tiny("qwen3")), draft), "belongs to another target"),
        (broken("truncated", -100), (target, draft), "cannot load the pre-verifier"),
        (broken("field", widht=3), (target, draft), "unknown field 'widht'"),
        (
            broken("input", inputs=["confidence", "hidden"]),
            (target, draft),
            r"its inputs .*hidden.* is no longer supported: train it",
        ),
        (
            broken("kind", kind="acceptance"),
            (target, draft),
            "its kind 'acceptance' is no longer supported",
        ),
        (tmp_path / "nothing", (target, draft), r"there is no .*config\.json"),
    ):
        refuses(message, load_pre_verifier, path, *models)
    # Fields of layers from before.
    more = {
        "draft_size": 32,
        "target_size": 32,
        "token_size": 32,
        "heads": 4,
        "layers": 0,
        "kind": "survival",
    }
    assert load_pre_verifier(
        broken("older", inputs=["confidence", "echoes", "history"], **more), target, draft
    )
    refuses("needs a pre-verifier", Decoder, target, None, draft, Pacer())


@pytest.mark.parametrize("rule", RULES)
def test_sampled_rows_do_not_depend_on_their_neighbours_or_ends(rule: str) -> None:
    """Among greedy ones, which stop together, and with rows that come and go."""

    def requests(rows: abc.Sequence[int]) -> list[Request]:
        return [Request(PROMPT, 5 + 3 * row, Sampler(False), seed=7, stream=row) for row in rows]

    def outputs(asked: abc.Sequence[Request], **options: Any) -> list[list[tuple[int, ...]]]:
        rows = decode(TableLM(TARGET), table_draft(stop(rule, None)), asked, **options)
        return [[(step.drafted, *step.tokens) for step in steps] for steps in rows]

    alone = [outputs([request])[0] for request in requests(range(6))]
    assert outputs(requests(range(6))) == alone
    assert outputs(requests(range(6)), max_rows=2) == alone
    others = [Request([1, 2], 9), Request([3], 30), Request([0], 14)]
    mixed = [request for pair in zip(requests(range(3)), others, strict=True) for request in pair]
    for options in ({}, {"max_rows": 3}):
        results = outputs(mixed, **options)
        assert results[::2] == alone[:3]
        plain = [tokens_of(steps) for steps in decode(TableLM(TARGET), PlainDrafter(), others)]
        assert [
            [token for _, *tokens in steps for token in tokens] for steps in results[1::2]
        ] == plain
