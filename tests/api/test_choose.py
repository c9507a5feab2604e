"""What a user names is parsed once, and the first rule that applies chooses the method."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.api.choose import RULES, Situation, choose
from forerun.methods import SD, Lyanna, Pacer, Suffix
from forerun.zoo import MODELS, WEIGHTS_FOLDER, ModelSource, own_draft
from tests.support.toys import refuses

NOTHING = Situation(
    method=None,
    settings={},
    has_draft=False,
    has_layer=False,
    given_layer=False,
    given_head=None,
    bundled_head=None,
    tuned={},
)
TUNED = {"default": {"greedy": "sd"}, "greedy": {"sd": {"gamma": 7}}}


def test_sources_are_of_a_kind(tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    file = tmp_path / "gguf" / "a.gguf"
    file.touch()
    model = object()
    kinds = {
        ("embedded", "target"): ("folder", WEIGHTS_FOLDER / "target", None),
        ("embedded", "draft"): ("folder", WEIGHTS_FOLDER / "draft", None),
        ("org/name", "target"): ("hub", None, None),
        (tmp_path, "target"): ("folder", tmp_path, None),
        (tmp_path / "gguf", "target"): ("gguf", tmp_path / "gguf", file),
        (str(file), "draft"): ("gguf", file, file),
        (model, "draft"): ("object", None, None),
        (tmp_path / "none", "head"): ("folder", tmp_path / "none", None),  # loading says more
    }
    for (given, role), expected in kinds.items():
        source = ModelSource.parse(given, role)
        assert (source.kind, source.path, source.gguf) == expected
        assert source.role == role and source.given is given
        assert ModelSource.parse(source, "another role") is source
    assert ModelSource.parse("org/name", "target").location == "org/name"


def test_what_is_missing_says_why_when_it_is_used(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    for given, role, problem in (
        ("no/such/folder", "target", "^no model folder 'no/such/folder' for the target$"),
        ("none.gguf", "draft", "^no GGUF file 'none.gguf' for the draft$"),
        (WEIGHTS_FOLDER / "lyanna", "draft", "^--draft '.*lyanna': this is a head: --head$"),
        (tmp_path, "target", "holds several GGUF files; give one of a.gguf, b.gguf$"),
    ):
        source = ModelSource.parse(given, role)
        assert source.kind == "missing"
        refuses(problem, source.check)
        refuses(problem, lambda source=source: source.location)


def test_only_known_names_have_companions() -> None:
    source = ModelSource.parse("embedded", "target")
    draft = source.own_draft()
    assert draft is not None and draft.known == own_draft("embedded") == "embedded"
    assert source.companion("lyanna") == WEIGHTS_FOLDER / "lyanna"
    for given in (WEIGHTS_FOLDER / "target", Path("embedded"), "org/name", None):
        source = ModelSource.parse(given, "target")
        assert source.own_draft() is source.companion("lyanna") is source.known is None
    assert all(ModelSource.parse(name, "target").known == name for name in MODELS)


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({}, Suffix()),
        ({"has_draft": True}, SD()),
        ({"has_draft": True, "has_layer": True}, Pacer()),
        ({"has_draft": True, "has_layer": True, "settings": {"gamma": 3}}, SD(gamma=3)),
        ({"has_draft": True, "tuned": TUNED}, SD(gamma=7)),
        ({"has_draft": True, "has_layer": True, "given_layer": True, "tuned": TUNED}, Pacer()),
        ({"given_head": "lyanna", "tuned": TUNED}, Lyanna()),
        ({"given_head": "lyanna", "settings": ["depth=3"]}, Lyanna(depth=3)),
        ({"given_head": "lyanna", "has_draft": True, "settings": ["gamma=3"]}, SD(gamma=3)),
        ({"given_head": "lyanna", "method": "sd", "has_draft": True}, SD()),
        ({"method": SD(gamma=2), "tuned": TUNED}, SD(gamma=2)),
        ({"method": "sd", "has_draft": True, "tuned": TUNED}, SD(gamma=7)),
        ({"method": "sd", "settings": {"gamma": 3}, "has_draft": True, "tuned": TUNED}, SD(3)),
    ],
)
def test_the_first_rule_that_applies_chooses(changes: dict, method: object) -> None:
    situation = Situation(**vars(NOTHING) | changes)
    assert choose(situation, "greedy") == method


def test_a_mode_without_a_tuned_method_has_the_default() -> None:
    situation = Situation(**vars(NOTHING) | {"has_draft": True, "tuned": TUNED})
    assert choose(situation, "sampling") == SD()
    assert RULES[-1].applies(NOTHING, "greedy")
