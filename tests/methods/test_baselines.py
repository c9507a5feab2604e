"""Methods that serve comparison only.

They are named like a user's own method: MODULE:CLASS.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forerun
from benchmarks.baselines.lookup import Lookup, LookupDrafter
from forerun import Decoder
from forerun.bench.plan import parse_methods
from forerun.engine.sequence import Request, Sequence
from forerun.engine.step import Drafter
from forerun.methods import METHODS, Method, Parts, method, parse_value
from tests.support.commands import run
from tests.support.toys import (
    BASELINES,
    LAYERED,
    noisy_copy,
    piecemeal,
    random_layer,
    refuses,
    tiny,
)

PROMPTS = [[5, 6, 7, 5, 6], [9], list(range(2, 40))]
HYBRID_OTHERS = (
    "other must be auto, sd, pacer, ouroboros, pacer-ouroboros, lyanna, pacer-lyanna, eagle, "
    "pacer-eagle, confidence, cumulative or of the form package.module:Class, not 'no'"
)


def greedy(chosen: Method, **parts: Any) -> None:
    target = tiny("llama")
    plain = Decoder(target).generate(PROMPTS, max_new_tokens=24, ignore_eos=True)
    decoder = Decoder(target, None, parts.pop("draft", None), chosen, False, **parts)
    done = decoder.generate(PROMPTS, max_new_tokens=24, ignore_eos=True)
    assert [row.tokens for row in done] == [row.tokens for row in plain]
    assert sum(row.stats.drafted for row in done) > 0


@pytest.mark.parametrize("name", BASELINES)
def test_greedy_output_is_the_targets(name: str) -> None:
    target = tiny("llama")
    draft = noisy_copy(target, 0.03)
    layer = random_layer(target, draft) if name in LAYERED else None
    chosen = method(BASELINES[name])
    assert chosen.name == name and name not in METHODS
    greedy(chosen, draft=draft, pre_verifier=layer)


def test_settings_out_of_range_are_refused() -> None:
    for name, options, message in (
        ("suffix", {"memory": True}, "memory must be an integer of at least 1, not True"),
        ("ouroboros", {"guesses": -1}, "guesses must be an integer of at least 0, not -1"),
        ("lookahead", {"ngram": 1}, "ngram must be an integer of at least 2, not 1"),
        ("confidence", {"threshold": 1.5}, "threshold must be a number from 0 to 1, not 1.5"),
        (
            "cumulative",
            {"threshold": float("nan")},
            "threshold must be a number from 0 to 1, not nan",
        ),
        ("cumulative", {"threshold": "0.3"}, "threshold must be a number from 0 to 1, not '0.3'"),
        ("svip", {"scale": -1.0}, "scale must be a number from 0 to 100, not -1.0"),
        ("adaedl", {"step": True}, "step must be a number from 0 to 1, not True"),
        ("hybrid", {"warm": "x"}, "warm must be true or false, not 'x'"),
        ("hybrid", {"other": "hybrid"}, "other must be auto, sd, pacer"),
        ("hybrid", {"other": "no"}, HYBRID_OTHERS),
        ("hybrid", {"other": "sd:depth=2"}, "method 'sd' has no setting 'depth'; it has gamma"),
        ("hybrid", {"other": "sd:gamma=x"}, "sd.gamma must be of type int | None, not 'x'"),
        ("hybrid", {"other": "sd:gamma"}, "method 'sd:gamma': the module 'sd' cannot be imported"),
        ("hybrid", {"other": "sd:gamma=2:gamma=9"}, "other must give gamma once"),
        ("pacer", {"block": 0}, "block must be an integer of at least 1, not 0"),
        ("pacer", {"threshold": 2.0}, "threshold must be"),
        ("pacer", {"most": 0}, "most must be an integer of at least 1, not 0"),
        ("pacer-lyanna", {"reuse": "both"}, "pacer-lyanna cannot value a second draft"),
        ("ar", {"gamma": 3}, "method 'ar' has no setting 'gamma'; it has none"),
    ):
        refuses(f"^{re.escape(message)}", method, BASELINES.get(name, name), **options)
    assert (
        method("pacer", block=None, threshold=None) == method("pacer")
        and method("pacer").needs_costs
    )


OWN = '''
    """A method of a user's, in one file."""

    from dataclasses import dataclass, field
    from typing import ClassVar

    from forerun.engine.draft import Draft
    from forerun.methods import Method, Parts
    from forerun.engine.step import Drafter, Proposal


    @dataclass(frozen=True)
    class Again(Method):
        """Proposes the last `count` tokens again."""

        count: int = 4
        name: ClassVar[str] = "again"

        def __post_init__(self) -> None:
            if self.count < 1:
                raise ValueError(f"count must be at least 1, not {self.count}")

        def build(self, parts: Parts) -> Drafter:
            return AgainDrafter(self.count)


    class AgainDrafter(Drafter):
        def __init__(self, count: int) -> None:
            self.count = count

        def propose(self, seqs: list) -> Proposal:
            chains = [seq.tokens[-self.count :][: seq.remaining - 1] for seq in seqs]
            pairs = zip(seqs, chains, strict=True)
            return Proposal([Draft.chain(seq.tokens[-1], chain) for seq, chain in pairs])


    Bare = dataclass(frozen=True)(type("Bare", (), {"name": "bare"}))


    @dataclass(frozen=True)
    class Needy(Again):
        size: int = field(kw_only=True)


    NUMBER = 3
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working folder, which is not where Python looks for modules."""
    (tmp_path / "my_methods.py").write_text(dedent(OWN))
    (tmp_path / "my_mistake.py").write_text("def (\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my_methods", "my_mistake"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "my_methods:Again"


def test_a_method_from_outside_decodes(outside: str) -> None:
    greedy(method(outside, count=6))
    target = tiny("llama")
    named = forerun.load(target, method=outside, count=3)
    given = forerun.load(target, method=Lookup(4))
    assert named.method == method(outside, count=3) and given.method == Lookup(4)
    completion, plain = (
        decoder.generate(PROMPTS[0], max_new_tokens=12, temperature=1.0, seed=3)
        for decoder in (named, Decoder(target, method=METHODS["ar"]()))
    )
    assert completion.tokens == plain.tokens


@pytest.mark.slow
def test_the_command_line_takes_it(outside: str) -> None:
    assert parse_value(outside, "count", "5") == 5
    chosen = parse_methods([outside, "suffix"], [f"{outside}.count=5"], None, {})
    assert chosen[outside] == method(outside, count=5) and list(chosen) == ["ar", outside, "suffix"]
    hybrid: Any = method("hybrid", other=f"{outside}:count=2")
    assert hybrid.other_method() == method(outside, count=2)
    method_args = ("--method", outside, "--method-arg", "count=2")
    done = run(
        "generate",
        "def f(",
        "--target",
        "embedded",
        *method_args,
        "--json",
        "--max-new-tokens",
        "8",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["method"] == "again"


def test_what_is_no_method_is_refused(outside: str) -> None:
    for name, options, message in (
        (
            "nowhere",
            {},
            "unknown method 'nowhere'; there are ar, sd, .*, and others as package.module:Class",
        ),
        (
            "no_such_module:Thing",
            {},
            "the module 'no_such_module' cannot be imported: No module named",
        ),
        ("my_mistake:Thing", {}, "the module 'my_mistake' cannot be imported: invalid syntax"),
        ("my_methods:Nothing", {}, "the module 'my_methods' has no 'Nothing'"),
        (
            "my_methods:NUMBER",
            {},
            "'my_methods:NUMBER' is no method: it must be a frozen dataclass",
        ),
        ("my_methods:Bare", {}, "is no method: it must be a frozen dataclass and a subclass"),
        ("my_methods:Needy", {}, "method 'my_methods:Needy' needs its setting 'size'"),
        ("my_methods:Again", {"gamma": 3}, "has no setting 'gamma'; it has count"),
        ("my_methods:Again", {"count": 0}, "count must be at least 1, not 0"),
    ):
        refuses(message, method, name, **options)


def test_objects_that_are_no_methods_are_refused() -> None:
    @dataclass(frozen=True)
    class Half:
        name: ClassVar[str] = "half"

        def build(self, parts: Parts) -> Drafter:
            raise AssertionError

    for wrong, message in (
        (Half(), "a subclass of forerun"),
        (Lookup, r"as Lookup\(\), not as a class"),
        (3, "frozen"),
    ):
        refuses(message, forerun.load, tiny("llama"), method=wrong)


def proposed(tokens: list[int], room: int = 20, ngram: int = 3) -> list[int]:
    seq = Sequence(Request(tokens, room))
    drafter = LookupDrafter(6, ngram)
    drafter.admit(seq, None, 8)
    return drafter.propose([seq]).drafts[0].tokens[1:]


def test_copies_from_the_latest_longest_match() -> None:
    for tokens, room, draft in (
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], 20, [4, 5, 6, 7, 8, 9]),
        ([1, 2, 3], 20, []),  # nothing stood here before
        (
            [1, 2, 9, 4, 2, 7, 1, 2],
            20,
            [9, 4, 2, 7, 1, 2],
        ),  # the longer match, though a shorter one is nearer
        (
            [5, 1, 5, 2, 5],
            20,
            [2, 5, 2, 5, 2, 5],
        ),  # the later of two matches; what follows is a period
        ([7, 7, 7], 20, [7] * 6),
        ([7, 7, 7], 3, [7, 7]),
        ([7, 7, 7], 1, []),
    ):
        assert proposed(tokens, room) == draft


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 20), st.integers(1, 4))
def test_indexing_token_by_token_equals_indexing_at_once(
    tokens: list[int], begin: int, ngram: int
) -> None:
    drafter = LookupDrafter(6, ngram)
    assert piecemeal(drafter, tokens, begin) == proposed(tokens, ngram=ngram)
    assert not drafter._indexes
