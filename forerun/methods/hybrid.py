"""Settings of suffix drafts with another method beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from forerun.methods.base import Method, number
from forerun.methods.lookup import METHODS, default_method, method, parse_value
from forerun.methods.suffix import Suffix

NEVER_OTHER = ("ar", "suffix", "hybrid")  # not allowed as `other`


@dataclass(frozen=True)
class Hybrid(Suffix):
    """Use the suffix draft if its score is at least `threshold`, else a draft of `other`.

    The score is the expected number of accepted tokens by counts. With a `threshold` of None
    ("auto"), the draft with the less expected time per token is used (`SourceChooser`). It is 6 if
    no costs are known.

    `other` is a method: a name, or a name and settings as in "cumulative:threshold=0.2:most=8".
    "auto" is the default method for the head or, without one, for the draft model. With neither,
    suffixes draft alone. The other settings are those of `suffix`.
    """

    threshold: float | None = number(None, 0, 1000)
    other: str = "auto"
    name: ClassVar[str] = "hybrid"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.other == "auto":
            return
        other = self.other_method()
        # It needs what `other` needs. These are no settings (fields) of the class.
        for name in ("needs_draft", "layer", "head"):
            object.__setattr__(self, name, getattr(other, name))

    @property
    def needs_costs(self) -> bool:
        """Return whether costs tell where drafts pay. Suffixes alone do without.

        They do so with a fixed threshold too, because it says nothing about batches.
        """
        return self.other != "auto"

    @property
    def any_tokenizer(self) -> bool:
        """Return whether the other method's draft model may have another tokenizer."""
        return self.other == "auto" or self.other_method().any_tokenizer

    def other_method(self) -> Method:
        """Return the method that `other` names, which is not "auto" here."""
        name, *given = str(self.other).split(":")
        if given and "=" not in given[0]:
            name += f":{given.pop(0)}"  # of another package
        names = [known for known in METHODS if known not in NEVER_OTHER]
        if name not in names and ":" not in name:
            raise ValueError(
                f"other must be auto, {', '.join(names)} or of the form package.module:Class, "
                f"not {name!r}"
            )
        settings: dict[str, int | float | bool | str | None] = {}
        for text in given:
            key, _, value = text.partition("=")
            if key in settings:
                raise ValueError(f"other must give {key} once: {self.other!r}")
            settings[key] = parse_value(name, key, value)
        return method(name, **settings)

    def resolve_defaults(self, draft: bool, layer: bool, head: str | None) -> Hybrid:
        """Return the method with the default for `other`, if that is "auto"."""
        if self.other != "auto" or not (draft or head):
            return self
        return replace(self, other=head or default_method(draft, layer))
