"""`resolve` chooses what a target is decoded with: the method, draft, layer, head and costs.

The method follows from an ordered table, RULES. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun import methods
from forerun.files import read_text
from forerun.methods import METHODS, Method, Pacer
from forerun.planning.cost_model import Costs, costs_of
from forerun.zoo import FOLDERS, ModelSource, is_eagle3, settings_of

if TYPE_CHECKING:
    from forerun.api.options import ModelOptions

BUNDLED_HEAD = "lyanna"  # the kind of head that ships with targets whose draft does not


@dataclass(frozen=True)
class Choice:
    """What decodes.

    Attributes:
        draft: the draft model, None unless a method drafts with a model.
        method: for greedy decoding, and for sampling too unless `sampling_method` is given.
        sampling_method: for sampling, or None.
        pre_verifier: the trained layer of a draft, None if none was given and no method needs one.
        head: the head over the target's hidden states, None likewise.
        costs: what forwards cost, if that is known before any is measured.
    """

    draft: ModelSource | None
    method: Method
    sampling_method: Method | None
    pre_verifier: ModelSource | None
    head: ModelSource | None
    costs: Costs | None

    @property
    def methods(self) -> list[Method]:
        """The method, and the one for sampling if it is given."""
        return [each for each in (self.method, self.sampling_method) if each is not None]


@dataclass(frozen=True)
class Sources:
    """What the user names, parsed, with the draft that belongs to the target if none is named.

    Attributes:
        target: the target. Nothing ships with one that is not known by name.
        draft: the draft, or None.
        is_own_draft: whether it is the one that ships with the target, or is downloaded with it.
        pre_verifier: the trained layer of the draft that the user gives, or None.
        head: the head over the target's hidden states that the user gives, or None.
    """

    target: ModelSource
    draft: ModelSource | None
    is_own_draft: bool
    pre_verifier: ModelSource | None
    head: ModelSource | None

    @classmethod
    def parse(cls, target: Any, draft: Any, pre_verifier: Any, head: Any) -> Sources:
        """Parse what the user names; None stands for what is not named."""
        source = ModelSource.parse(target, "target")
        own_draft = source.own_draft()
        drafting = own_draft if draft is None else ModelSource.parse(draft, "draft")
        return cls(
            source,
            drafting,
            _is_own(drafting, own_draft),
            None if pre_verifier is None else ModelSource.parse(pre_verifier, "pre-verifier"),
            None if head is None else ModelSource.parse(head, "head"),
        )

    def layer(self, part: str | None) -> ModelSource | None:
        """Return the pre-verifier: the given one, else one that ships with the target as `part`.

        A layer belongs to a draft, so one that ships with a target is for the target's own draft.
        """
        if self.pre_verifier is not None or not self.is_own_draft:
            return self.pre_verifier
        folder = self.target.companion(part)
        return ModelSource.parse(folder, "pre-verifier") if folder is not None else None

    def hidden(self, part: str | None) -> ModelSource | None:
        """Return the head: the given one, else one that ships with the target as `part`."""
        if self.head is not None:
            return self.head
        folder = self.target.companion(part)
        return ModelSource.parse(folder, "head") if folder is not None else None

    @property
    def bundled_head(self) -> str | None:
        """The kind of the head that ships with the target; None beside a draft."""
        has_head = self.draft is None and self.target.companion(BUNDLED_HEAD) is not None
        return BUNDLED_HEAD if has_head else None


@dataclass(frozen=True)
class Situation:
    """What is known before a method is chosen.

    Attributes:
        method: the user's choice, a name or an instance with its settings.
        settings: the method's settings by name, or as the command line has them: NAME=VALUE.
        has_draft: whether there is a draft model.
        has_layer: whether there is a pre-verifier for it.
        given_layer: whether the user gives that pre-verifier.
        given_head: the kind of the head that the user gives.
        bundled_head: the kind of the head that ships with the target; None beside a draft.
        tuned: the settings that ship with the target (`shipped`).
    """

    method: str | Method | None
    settings: Mapping[str, Any] | Sequence[str]
    has_draft: bool
    has_layer: bool
    given_layer: bool
    given_head: str | None
    bundled_head: str | None
    tuned: Mapping[str, Any]

    @property
    def names_method(self) -> bool:
        """Whether the user names a method, or one of its settings."""
        return self.method is not None or bool(self.settings)

    @property
    def leaves_all(self) -> bool:
        """Whether the user leaves the choice of method, layer and head to forerun."""
        return not self.names_method and not self.given_layer and self.given_head is None

    @property
    def names_method_alone(self) -> bool:
        """Whether the user gives a method's name, and neither settings nor layer nor head."""
        is_alone = not self.settings and not self.given_layer and self.given_head is None
        return isinstance(self.method, str) and is_alone

    @property
    def setting_names(self) -> set[str]:
        """The names of the settings that are given."""
        if isinstance(self.settings, Mapping):
            return set(self.settings)
        return {text.partition("=")[0] for text in self.settings}

    def made(self, name: str | Method) -> Method:
        """Return a method with the settings that are given. Raises ValueError for wrong ones."""
        if isinstance(self.settings, Mapping):
            return methods.method(name, **self.settings)
        return methods.method(name, **_parse(str(name), self.settings))

    @property
    def fits_head(self) -> bool:
        """Whether the user names no method but gives a head, whose method has all the settings."""
        if self.given_head is None or self.method is not None:
            return False
        return self.setting_names <= methods.settings_of(METHODS[self.given_head]).keys()

    @property
    def tuned_names(self) -> Mapping[str, str]:
        """The fastest method for this target in each mode, "greedy" and "sampling", if known."""
        names: Mapping[str, str] = self.tuned.get("default", {})
        return names

    def tuned_method(self, mode: str) -> Method:
        """Return the fastest method for this target in a mode, with the fastest settings."""
        return self.with_tuned_settings(self.tuned_names[mode], mode)

    def with_tuned_settings(self, name: str, mode: str) -> Method:
        """Return a method with the settings that are fastest for this target, if known."""
        return methods.method(name, **self.tuned.get(mode, {}).get(name, {}))


@dataclass(frozen=True)
class Rule:
    """A rule of the choice of a method.

    Attributes:
        applies: whether the rule applies in a situation, for a mode ("greedy" or "sampling").
        chosen: the method that it chooses then, by its name or with its settings.
    """

    applies: Callable[[Situation, str], bool]
    chosen: Callable[[Situation, str], str | Method | None]


# The first rule that applies chooses the method.
RULES = (
    # The user's own word comes first. A name alone means the method as it is fastest here.
    Rule(
        applies=lambda situation, mode: situation.names_method_alone,
        chosen=lambda situation, mode: situation.with_tuned_settings(str(situation.method), mode),
    ),
    Rule(
        applies=lambda situation, mode: bool(situation.method),
        chosen=lambda situation, mode: situation.method,
    ),
    # Whoever gives a head wants it used, unless a setting shows that another method is meant.
    Rule(
        applies=lambda situation, mode: situation.fits_head,
        chosen=lambda situation, mode: situation.given_head,
    ),
    # What was fastest for this target was measured with the parts that ship with it.
    Rule(
        applies=lambda situation, mode: situation.leaves_all and mode in situation.tuned_names,
        chosen=lambda situation, mode: situation.tuned_method(mode),
    ),
    # "pacer" with a draft and its pre-verifier, "sd" with a draft, "suffix" without.
    Rule(
        applies=lambda situation, mode: True,
        chosen=lambda situation, mode: methods.default_method(
            situation.has_draft, situation.has_layer, situation.setting_names
        ),
    ),
)


def choose(situation: Situation, mode: str) -> Method:
    """Return the method for a mode, "greedy" or "sampling", by the first of RULES that applies.

    Raises ValueError for an unknown method or setting.
    """
    rule = next(rule for rule in RULES if rule.applies(situation, mode))
    name = rule.chosen(situation, mode)
    assert name is not None
    head = situation.given_head or situation.bundled_head
    method = situation.made(name)
    return method.resolve_defaults(situation.has_draft, situation.has_layer, head)


def resolve(
    target: Any,
    draft: Any = None,
    method: str | Method | None = None,
    settings: Mapping[str, Any] | Sequence[str] = (),
    *,
    pre_verifier: Any = None,
    head: Any = None,
    models: ModelOptions | None = None,
) -> Choice:
    """Choose what a target is decoded with. Loads no weights.

    A draft, layer or head that is not given is the one that ships with forerun for a target of that
    name. The method is the first of these:

    1. the one that the user names. If nothing else is given, it has the settings that ship for it;
    2. the one of the given head's kind, if it has the given settings;
    3. the one that ships with the target, if the user gives neither settings nor a layer;
    4. "pacer" with a draft and its pre-verifier, "sd" with a draft, and "suffix" without a draft.

    Args:
        target: a hub id, folder, file, model or ModelSource. Nothing ships with a model that is
            given as an object.
        draft: likewise.
        method: a name, or an instance with its settings.
        settings: the method's settings by name, or as the command line has them: NAME=VALUE.
        pre_verifier: the trained layer of the draft, a folder or the layer.
        head: the head over the target's hidden states, a folder or the head.
        models: how models are loaded. None ignores what ships with the target.

    Raises:
        ValueError: an unknown method or setting; a method without the draft, layer or head that it
            needs; the folder of a head that is not supported.
    """
    sources = Sources.parse(target, draft, pre_verifier, head)
    is_usual = models is not None and models.are_usual
    tuned = shipped(sources.target, sources.draft) if is_usual else {}
    situation = Situation(
        method=method,
        settings=settings,
        has_draft=sources.draft is not None,
        has_layer=sources.layer(Pacer.layer) is not None,
        given_layer=sources.pre_verifier is not None,
        given_head=kind_of(sources.head),
        bundled_head=sources.bundled_head,
        tuned=tuned,
    )
    chosen = choose(situation, "greedy")
    has_two_modes = bool(tuned) and (situation.leaves_all or situation.names_method_alone)
    sampling = choose(situation, "sampling") if has_two_modes else None
    other = None if sampling == chosen else sampling
    return _equipped(sources, chosen, other, _known_costs(situation, chosen))


def _equipped(
    sources: Sources, method: Method, sampling_method: Method | None, costs: Costs | None
) -> Choice:
    """Return the methods with the parts that they need. Raises ValueError if one is missing."""
    both = [each for each in (method, sampling_method) if each is not None]
    layer_name = next((user.layer for user in both if user.layer), None)
    head_name = next((user.head for user in both if user.head), None)
    needs_draft = any(user.needs_draft for user in both)
    choice = Choice(
        draft=sources.draft if needs_draft else None,
        method=method,
        sampling_method=sampling_method,
        pre_verifier=sources.layer(layer_name),
        head=sources.hidden(head_name),
        costs=costs,
    )
    for user in both:
        _check(user, choice)
    return choice


def shipped(target: Any, draft: Any) -> dict[str, Any]:
    """Return what ships with a target and its own draft; {} for other models.

    Its settings were chosen on one machine, with prompts for validation. They are
    {"greedy" or "sampling": {method: {setting: value}}}; "default": the method of each mode; and
    "costs": the table of costs, so that methods of the pair decide alike on all machines.
    """
    source = ModelSource.parse(target, "target")
    if draft is not None and not _is_own(ModelSource.parse(draft, "draft"), source.own_draft()):
        return {}
    if source.known is None or source.known not in FOLDERS:
        return {}
    path = FOLDERS[source.known] / "tuned.json"
    return dict(json.loads(read_text(path))) if path.is_file() else {}


def kind_of(head: Any) -> str | None:
    """Return the kind of a head, which is the name of its method; None without a head.

    A folder that cannot be read counts as Lyanna's, because loading it says what is wrong. Raises
    ValueError for a folder of a drafter that is not supported (`forerun.zoo.is_eagle3`).
    """
    if head is None:
        return None
    source = ModelSource.parse(head, "head")
    if source.path is None:
        config = getattr(source.given, "config", None)
        described: Any = config if hasattr(config, "kind") else source.given
        return str(described.kind)
    if is_eagle3(source.path):
        return "eagle"
    kind = settings_of(source.path).get("kind")
    kinds = [each.head for each in METHODS.values() if each.head is not None]
    return str(kind) if kind in kinds else "lyanna"


def _is_own(draft: ModelSource | None, own_draft: ModelSource | None) -> bool:
    """Return whether a draft is the one that belongs to a target known by name."""
    return draft is not None and own_draft is not None and draft.known == own_draft.known


def _known_costs(situation: Situation, method: Method) -> Costs | None:
    """Return the costs that ship with the target, if they are wanted."""
    if "costs" not in situation.tuned:
        return None
    if situation.names_method and not method.needs_costs:
        return None
    return costs_of(situation.tuned["costs"])


def _parse(name: str, texts: Sequence[str]) -> dict[str, Any]:
    """Parse settings of the command line."""
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"--method-arg takes NAME=VALUE, not {text!r}")
        values[key] = methods.parse_value(name, key, value)
    return values


def _check(method: Method, choice: Choice) -> None:
    """Raise ValueError if a method lacks a part that it needs."""
    if method.needs_draft and choice.draft is None:
        raise ValueError(f"method {method.name!r} needs a draft model: give a draft")
    if method.layer is not None and choice.pre_verifier is None:
        raise ValueError(
            f"method {method.name!r} needs a pre-verifier: "
            "train one with `forerun train pre-verifier`"
        )
    if method.head is not None and choice.head is None:
        kind = "" if method.head == "lyanna" else f" --kind {method.head}"
        raise ValueError(
            f"method {method.name!r} needs a head: give one, "
            f"or train one with `forerun train lyanna{kind}`"
        )
