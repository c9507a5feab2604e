"""Length policies: each stops where its rule says, whatever the batch, and oracles know what they should."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log, prod, sqrt

import pytest
import torch
from torch import Tensor
from toys import TableLM, joint_law, noisy_copy, p_value, random_table, tiny, tiny_tokenizer
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as hf

from forerun import Decoder
from forerun.bench.choose import parse_methods
from forerun.bench.datasets import Prompt
from forerun.bench.plan import Plan
from forerun.bench.session import bench
from forerun.decode import Generation, Step, decode
from forerun.draft import Draft
from forerun.drafters.chain import ChainDrafter
from forerun.lengths import FixedLength, LengthPolicy, Look
from forerun.lengths.entropy import AdaptiveEntropyStop, entropies
from forerun.lengths.oracle import Truth
from forerun.lengths.schedule import HeuristicSchedule
from forerun.methods import (
    AR,
    SD,
    SVIP,
    AdaEDL,
    Confidence,
    Cumulative,
    Heuristic,
    Method,
    Oracle,
    Parts,
    SeeingOracle,
    method,
)
from forerun.metrics import summarise
from forerun.model import CausalLM
from forerun.sampling import Sampler, Verdict

V, FITS = 8, 1e-4
TARGET = random_table(V, 1, 1.3)
DRAFT = TARGET + random_table(V, 2, 0.7)
PROMPTS = [[0], [1, 2, 3], [3, 3], [2, 0, 1, 2, 0, 1, 2], [5], [6, 7]]
LIMITS = [30, 7, 19, 3, 26, 12]  # rows that end at different times
TOP_P = LogitsProcessorList([hf.TopPLogitsWarper(0.8)])  # leaves scores of -inf
RULES: dict[str, Method] = {
    "heuristic": Heuristic(3),
    "confidence": Confidence(0.35, 5),
    "cumulative": Cumulative(0.15, 5),
    "svip": SVIP(0.5, most=5),
    "adaedl": AdaEDL(0.5, step=1.0, most=5),
}
ORACLES: dict[str, Method] = {"oracle": Oracle(), "seeing-oracle": SeeingOracle()}
ALL = RULES | ORACLES


def sequences(sampler: Sampler, limits: Sequence[int] = LIMITS, **options) -> list[Generation]:
    """One of each prompt, each with as much room as its limit says."""
    return [
        Generation(
            list(prompt),
            len(prompt) + limit,
            sampler,
            generator=None if sampler.greedy else torch.Generator().manual_seed(i),
            index=i,
            **options,
        )
        for i, (prompt, limit) in enumerate(zip(PROMPTS, limits, strict=True))
    ]


def built(chosen: Method, truth: Truth | None = None) -> ChainDrafter:
    drafter = chosen.build(Parts(TableLM(TARGET), TableLM(DRAFT), truth=truth))
    assert isinstance(drafter, ChainDrafter)
    return drafter


def run(drafter: ChainDrafter, seqs: Sequence[Generation]) -> list[Step]:
    return [step for batch in decode(TableLM(TARGET), drafter, seqs) for step in batch]


def plain(seqs: Sequence[Generation]) -> list[list[int]]:
    for _ in decode(TableLM(TARGET), AR().build(Parts(TableLM(TARGET))), seqs):
        pass
    return [seq.output for seq in seqs]


class Watched(LengthPolicy):
    """Passes everything on and keeps, for each sequence, what each of its drafts came to and could have come to."""

    def __init__(self, policy: LengthPolicy) -> None:
        self.policy = policy

    def start(self, seqs: Sequence[Generation], hidden: Tensor | None = None) -> None:
        self.policy.start(seqs)
        self.seqs = list(seqs)
        self.drafts: dict[int, list[tuple[list[int], int, int]]] = {seq.index: [] for seq in seqs}

    def more(self, look: Look) -> list[bool]:
        return self.policy.more(look)

    def observe(self, drafts: list[Draft], verdicts: list[Verdict], hidden: torch.Tensor | None) -> None:
        self.policy.observe(drafts, verdicts, hidden)
        for seq, draft, verdict in zip(self.seqs, drafts, verdicts, strict=True):
            # The sequence has grown by the accepted tokens and one more, or was cut at its end.
            self.drafts[seq.index].append((draft.tokens, verdict.accepted, seq.limit))

    def keep(self, rows: list[int]) -> None:
        self.policy.keep(rows)
        self.seqs = [self.seqs[row] for row in rows]


def laws(seq_tokens: Sequence[int], drafted: Sequence[int], sampler: Sampler) -> list[torch.Tensor]:
    """The draft's law of each drafted token, from its table."""
    text = [0, *seq_tokens]
    found = []
    for token in drafted:
        found.append(sampler.scores(DRAFT[text[-2], text[-1]][None], lambda _: [])[0].double().softmax(-1))
        text.append(token)
    return found


def entropy(law: torch.Tensor) -> float:
    return -sum(p * log(p) for p in law.tolist() if p > 0)


class Rule:
    """The rules once more, by their definitions: whether a draft goes on behind its tokens."""

    def __init__(self, name: str) -> None:
        self.name, self.threshold, self.rate, self.length = name, 0.5, 0.9, 3

    def more(self, tokens: Sequence[int], found: Sequence[torch.Tensor]) -> bool:
        probabilities = [float(law[token]) for law, token in zip(found, tokens, strict=True)]
        if self.name == "heuristic":
            return len(tokens) < self.length
        going = {
            "confidence": lambda: probabilities[-1] >= 0.35,
            "cumulative": lambda: prod(probabilities) >= 0.15,
            "svip": lambda: 1 - sqrt(0.15 * entropy(found[-1])) >= 0.5,
            "adaedl": lambda: 1 - sqrt(0.2 * entropy(found[-1])) >= self.threshold,
        }[self.name]()
        return going and len(tokens) < 5

    def saw(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        self.length = self.length + 2 if accepted == drafted else max(1, self.length - 1)
        self.rate = (self.rate + accepted / drafted) / 2
        if self.rate < 0.9:
            self.threshold += 0.1
        elif accepted != 5:
            self.threshold -= 0.1


@pytest.mark.parametrize(
    "sampler", [Sampler(), Sampler(False), Sampler(False, TOP_P)], ids=["greedy", "drawn", "top-p"]
)
@pytest.mark.parametrize("name", RULES)
def test_drafts_end_where_the_rule_says(name: str, sampler: Sampler) -> None:
    drafter = built(RULES[name])
    watched = drafter.policy = Watched(drafter.policy)
    seqs = sequences(sampler)
    run(drafter, seqs)
    lengths = set()
    for seq in seqs:
        rule, at = Rule(name), seq.prompt_length
        for (root, *drafted), accepted, limit in watched.drafts[seq.index]:
            assert root == seq.tokens[at - 1]
            room = limit - at - 1
            found = laws(seq.tokens[:at], drafted, sampler)
            for count in range(1, len(drafted)):
                assert rule.more(drafted[:count], found[:count])
            assert len(drafted) == room or not rule.more(drafted, found)
            lengths.add(len(drafted))
            rule.saw(len(drafted), accepted)
            at += accepted + 1
    assert len(lengths) >= 3  # it does depend


@pytest.mark.parametrize("processors", [None, TOP_P], ids=["none", "top-p"])
@pytest.mark.parametrize("name", RULES)
def test_rules_keep_the_law_in_a_batch_of_different_rows(name: str, processors: LogitsProcessorList | None) -> None:
    copies, length, generator = 700, 2, torch.Generator().manual_seed(3)
    sampler = Sampler(False, processors)
    seqs = [
        Generation(list(prompt), len(prompt) + 3 + i % 5, sampler, generator=generator, index=i)
        for i, prompt in enumerate(PROMPTS[:3] * copies)
    ]
    run(built(RULES[name]), seqs)
    for start, prompt in enumerate(PROMPTS[:3]):
        outputs = [seq.output[:length] for seq in seqs[start::3]]
        assert p_value(outputs, joint_law(TARGET, prompt, length, processors)) > FITS


@pytest.mark.parametrize("name", ALL)
def test_greedy_output_is_the_targets_in_a_batch_and_alone(name: str) -> None:
    expected = plain(sequences(Sampler(), eos=frozenset({4})))
    seqs = sequences(Sampler(), eos=frozenset({4}))
    steps = run(built(ALL[name]), seqs)
    assert [seq.output for seq in seqs] == expected
    assert {seq.finish_reason for seq in seqs} == {"stop", "length"}
    for seq in seqs:
        # What a row drafts does not depend on its neighbours either.
        alone = Generation(seq.tokens[: seq.prompt_length], seq.limit, eos=seq.eos, index=seq.index)
        own = [(step.drafted, step.tokens) for step in steps if step.index == seq.index]
        assert [(step.drafted, step.tokens) for step in run(built(ALL[name]), [alone])] == own


def verdict(accepted: int, drafted: int) -> Verdict:
    return Verdict(list(range(accepted + 1)), 0, min(accepted + 1, drafted), accepted < drafted)


def told(policy: LengthPolicy, *rows: tuple[int, int]) -> None:
    """Verdicts (accepted, drafted) of each row."""
    drafts = [Draft.chain(0, [0] * drafted) for _, drafted in rows]
    policy.observe(drafts, [verdict(*row) for row in rows], None)


CERTAIN = {"sd": SD(4), "heuristic": Heuristic(3)}


@pytest.mark.parametrize("eos", [frozenset[int](), frozenset({2, 4})])
@pytest.mark.parametrize("name", CERTAIN)
def test_tokens_that_are_drafted_in_any_case_are_not_waited_for(name: str, eos: frozenset[int]) -> None:
    """Drafts are those of a policy that leaves nothing certain, in a batch of rows that end at different times."""
    found, forwards = [], []
    for hasty in (True, False):
        drafter, seqs = built(CERTAIN[name]), sequences(Sampler(), eos=eos)
        watched = Watched(drafter.policy)
        drafter.policy = watched
        calls, roll = [], drafter.model.roll

        def counted(*args, calls=calls, roll=roll):  # type: ignore[no-untyped-def]
            calls.append(args[1])
            return roll(*args)

        if hasty:
            watched.certain = watched.policy.certain  # type: ignore[method-assign]
        drafter.model.roll = counted  # type: ignore[method-assign]
        run(drafter, seqs)
        found.append(([seq.output for seq in seqs], watched.drafts))
        assert max(calls) > 1 if hasty else set(calls) == {1}
        forwards.append(sum(calls))
    assert found[0] == found[1]
    assert eos or forwards[0] == forwards[1]  # what is behind an end token is run in vain


def test_the_heuristic_schedule() -> None:
    policy = HeuristicSchedule(2)
    policy.start(sequences(Sampler())[:2])

    def lengths(rows: int) -> list[int]:
        asked = ((depth, Look(list(range(rows)), [[0] * depth] * rows, torch.zeros(rows, V))) for depth in range(1, 20))
        stops = [(depth, policy.more(look)) for depth, look in asked]
        return [next(depth for depth, going in stops if not going[row]) for row in range(rows)]

    seen = [lengths(2)]
    # Fully accepted, partly, not at all, nothing drafted, accepted though cut short by the sequence's end.
    for first, second in [((2, 2), (1, 2)), ((4, 4), (0, 1)), ((5, 6), (0, 1)), ((0, 0), (1, 1)), ((2, 2), (0, 0))]:
        told(policy, first, second)
        seen.append(lengths(2))
    assert seen == [[2, 2], [4, 1], [6, 1], [5, 1], [5, 3], [7, 3]]
    policy.keep([1])
    assert lengths(1) == [3]
    told(policy, (3, 3))
    assert lengths(1) == [5]


def test_adaedls_threshold_follows_the_acceptance_rate() -> None:
    policy = AdaptiveEntropyStop(0.5, 0.2, goal=0.8, step=0.1, most=4)
    policy.start(sequences(Sampler())[:3])
    told(policy, (0, 3), (3, 3), (4, 4))
    assert policy.rates == pytest.approx([0.4, 0.9, 0.9])
    assert policy.thresholds == pytest.approx([0.51, 0.49, 0.5])
    told(policy, (3, 3), (0, 0), (2, 4))  # 0.7 is still below the goal
    assert policy.rates == pytest.approx([0.7, 0.9, 0.7])
    assert policy.thresholds == pytest.approx([0.52, 0.49, 0.51])
    policy.keep([2, 0])
    assert policy.rates == pytest.approx([0.7, 0.7]) and policy.thresholds == pytest.approx([0.51, 0.52])
    policy.start(sequences(Sampler())[:1])
    assert (policy.rates, policy.thresholds) == ([0.8], [0.5])


def test_entropies() -> None:
    scores = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, -torch.inf, 0.0, -torch.inf], [9e4, 0.0, 0.0, -torch.inf]])
    assert entropies(scores) == pytest.approx([log(4), log(2), 0.0])
    wide = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)) * 4
    assert entropies(wide) == pytest.approx(torch.special.entr(wide.double().softmax(-1)).sum(-1).tolist(), rel=1e-5)


@pytest.mark.parametrize("eos", [frozenset(), frozenset({4})], ids=["no end", "end token"])
@pytest.mark.parametrize("name", ORACLES)
def test_oracles_accept_all_that_any_length_could(name: str, eos: frozenset[int]) -> None:
    steps = run(built(ALL[name]), sequences(Sampler(), eos=eos))
    # Drafts that go on to the very end of each sequence.
    longest = run(ChainDrafter(TableLM(DRAFT), FixedLength(99)), sequences(Sampler(), eos=eos))
    assert [(step.index, step.tokens, step.accepted) for step in steps] == [
        (step.index, step.tokens, step.accepted) for step in longest
    ]
    assert summarise(longest, 1.0).tau > 1.5  # so there is something to know
    wasted = {step.drafted - step.accepted for step in steps}
    if name == "oracle":
        assert summarise(steps, 1.0).utilisation == 1.0 and wasted == {0}
    else:
        assert wasted == {0, 1}


def test_an_oracle_runs_no_draft_where_nothing_will_be_accepted() -> None:
    drafter = Oracle().build(Parts(TableLM(TARGET), TableLM(-TARGET)))
    steps = run(drafter, sequences(Sampler()))
    assert {(step.drafted, step.draft_forwards) for step in steps} == {(0, 0)}


@pytest.mark.parametrize("name", ORACLES)
def test_the_truth_is_remembered_and_enlarged_where_it_is_too_short(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    fresh = TableLM.fresh
    monkeypatch.setattr(TableLM, "fresh", lambda self: asked.append("fresh") or fresh(self))
    truth = Truth()

    def outputs(limits: Sequence[int], **options) -> tuple[list[list[int]], int, float]:
        """What is said, how many models were asked for it beforehand, and the share of rejected drafts."""
        asked.clear()
        seqs = sequences(Sampler(), limits, **options)
        steps = run(built(ALL[name], truth), seqs)
        return [seq.output for seq in seqs], len(asked), max(step.drafted - step.accepted for step in steps)

    waste = 0 if name == "oracle" else 1
    drafts = len(PROMPTS) if name == "oracle" else 0
    ends = frozenset({4})
    ended = plain(sequences(Sampler(), [20] * 6, eos=ends))
    short = [4 in output for output in ended]
    assert any(short) and not all(short)
    # Rows are found together by the target, one by one by the draft.
    assert outputs([20] * 6, eos=ends) == (ended, 1 + drafts, waste)
    assert truth.outputs == {tuple(prompt): output for prompt, output in zip(PROMPTS, ended, strict=True)}
    assert outputs([20] * 6, eos=ends) == (ended, 0, waste)
    assert outputs([9] * 6, eos=ends)[1] == 0  # less than what is known
    # Without an end token the rows that it ended are too short; then all are long enough, with one or without.
    endless = plain(sequences(Sampler(), [20] * 6))
    assert outputs([20] * 6) == (endless, 1 + (sum(short) if drafts else 0), waste)
    assert outputs([20] * 6, eos=ends) == (ended, 0, waste)
    longer = plain(sequences(Sampler(), [25] * 6))
    assert outputs([25] * 6) == (longer, 1 + drafts, waste)


@pytest.mark.parametrize("name", ORACLES)
def test_the_truth_is_what_the_processors_make_of_it(name: str) -> None:
    truth = Truth()
    run(built(ALL[name], truth), sequences(Sampler()))
    known = dict(truth.outputs)
    penalised = Sampler(True, LogitsProcessorList([hf.RepetitionPenaltyLogitsProcessor(2.5)]))
    expected = plain(sequences(penalised))
    assert expected != list(known.values())
    seqs = sequences(penalised)
    steps = run(built(ALL[name], truth), seqs)
    assert [seq.output for seq in seqs] == expected and truth.outputs == known
    assert max(step.drafted - step.accepted for step in steps) == (0 if name == "oracle" else 1)
    assert summarise(steps, 1.0).tau > 1.2


@pytest.mark.parametrize("name", ORACLES)
def test_a_wrong_truth_costs_time_and_changes_nothing(name: str) -> None:
    expected = plain(sequences(Sampler()))
    truth = Truth({tuple(prompt): [0, 1] * 20 for prompt in PROMPTS})
    seqs = sequences(Sampler())
    run(built(ALL[name], truth), seqs)
    assert [seq.output for seq in seqs] == expected


@pytest.mark.parametrize("name", ORACLES)
def test_a_drafter_may_start_late(name: str) -> None:
    # Sequences that have begun their output, as behind a guard.
    expected = plain(sequences(Sampler(), [20] * 6))
    seqs = sequences(Sampler(), [20] * 6)
    for seq, output, begun in zip(seqs, expected, (0, 1, 5, 3, 18, 0), strict=True):
        seq.tokens += output[:begun]
    truth = Truth()
    steps = run(built(ALL[name], truth), seqs)
    assert [seq.output for seq in seqs] == expected
    assert max(step.drafted - step.accepted for step in steps) == (0 if name == "oracle" else 1)
    assert truth.outputs == {tuple(prompt): output for prompt, output in zip(PROMPTS, expected, strict=True)}


@pytest.mark.parametrize("name", ORACLES)
def test_a_draft_that_cannot_read_everything(name: str) -> None:
    # The target's own weights, but for its last tokens, and a context shorter than the outputs are.
    # It has a table of positions, so reading on would fail.
    target, small = tiny("gpt2"), tiny("gpt2", vocab=50, context=40)
    sizes = {key: weight.shape for key, weight in small.state_dict().items()}
    small.load_state_dict(
        {key: weight[tuple(map(slice, sizes[key]))] for key, weight in target.state_dict().items() if key in sizes}
    )
    prompts = [[10], [31], [60, 3], list(range(1, 45)), list(range(2, 38))]
    truth, outputs = Truth(), []
    for chosen in (AR(), ALL[name], ALL[name]):  # the last time from memory
        seqs = [Generation(list(prompt), len(prompt) + 45, index=i) for i, prompt in enumerate(prompts)]
        drafter = chosen.build(Parts(CausalLM(target), CausalLM(small), truth=truth))
        steps = [step for batch in decode(CausalLM(target), drafter, seqs) for step in batch]
        outputs.append([seq.output for seq in seqs])
        assert max(step.drafted - step.accepted for step in steps) <= (name != "oracle")
    assert outputs[0] == outputs[1] == outputs[2]
    # It drafts up to its context, up to a token that it lacks, and nothing behind a prompt that it cannot read.
    assert max(outputs[0][0]) < 50 and next(at for at, token in enumerate(outputs[0][1]) if token >= 50) == 20
    said = [sum(step.accepted for step in steps if step.index == i) for i in range(len(prompts))]
    assert said[:4] == [40, 20, 0, 0]


@pytest.mark.parametrize("name", ALL)
def test_real_models(name: str) -> None:
    tokenizer = tiny_tokenizer()
    target = tiny("llama", vocab=len(tokenizer))
    draft = noisy_copy(target, 0.02)
    prompts = [tokenizer.encode("def add(a, b):\n"), tokenizer.encode("the cat sat"), [5]]
    config = GenerationConfig(max_new_tokens=40, do_sample=False)
    plain_rows = Decoder(target, tokenizer, None, AR()).generate(prompts, config)
    decoder = Decoder(target, tokenizer, draft, ALL[name])
    assert [row.tokens for row in decoder.generate(prompts, config)] == [row.tokens for row in plain_rows]
    config = GenerationConfig(max_new_tokens=40, do_sample=False, stop_strings=[plain_rows[0].text[9:12]])
    stopped = Decoder(target, tokenizer, None, AR()).generate(prompts, config)
    again = decoder.generate(prompts, config)
    assert [row.tokens for row in again] == [row.tokens for row in stopped]
    assert again[0].finish_reason == "stop" and len(again[0].tokens) < 40


@pytest.mark.parametrize("name", ORACLES)
def test_oracles_refuse_to_guess_what_will_be_drawn(name: str) -> None:
    target = tiny("llama")
    decoder = Decoder(target, None, target, ALL[name])
    with pytest.raises(ValueError, match=r"greedy decoding alone .* changes the law"):
        decoder.generate([1, 2, 3], temperature=1.0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("heuristic", {"gamma": 0}, "gamma must be an integer of at least 1, not 0"),
        ("confidence", {"threshold": 1.5}, "threshold must be a number from 0 to 1, not 1.5"),
        ("confidence", {"most": 0}, "most must be an integer of at least 1, not 0"),
        ("cumulative", {"threshold": float("nan")}, "threshold must be a number from 0 to 1, not nan"),
        ("cumulative", {"threshold": "0.3"}, "threshold must be a number from 0 to 1, not '0.3'"),
        ("svip", {"threshold": -0.1}, "threshold must be a number from 0 to 1, not -0.1"),
        ("svip", {"scale": -1.0}, "scale must be a number from 0 to 100, not -1.0"),
        ("adaedl", {"goal": 2}, "goal must be a number from 0 to 1, not 2"),
        ("adaedl", {"step": True}, "step must be a number from 0 to 1, not True"),
        ("oracle", {"gamma": 3}, "method 'oracle' has no setting 'gamma'; it has none"),
    ],
)
def test_settings_out_of_range(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        method(name, **options)
    assert str(error.value) == message


def test_a_benchmark_tells_oracles_the_truth_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    from forerun.lengths import oracle

    plainly: Callable = oracle.plain
    monkeypatch.setattr(oracle, "plain", lambda *given: asked.append("plain") or plainly(*given))
    monkeypatch.setattr("forerun.bench.session.measure", lambda *given, **options: asked.append("measure"))
    monkeypatch.setattr("forerun.bench.session.results", lambda *given: {})
    prompts = [Prompt(str(i), None, [7 + i, 8, 9]) for i in range(3)]
    plan = Plan(parse_methods([*ALL], [], None, {}), ("own.jsonl",), draft="embedded", max_new_tokens=12, batch=2)
    bench(plan, {"own.jsonl": prompts})
    assert asked == ["plain", "plain", "measure"]  # two batches, once for both oracles
