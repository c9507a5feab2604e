"""What a user asks of a generation.

It needs no torch, so that bad values are refused before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from numbers import Integral, Real
from typing import Any

from forerun.sampling.response_format import form_of


@dataclass(frozen=True)
class SamplingParams:
    """How to generate. The names are those of vLLM and transformers.

    Of the checkpoint's generation config only the end tokens are used. To use all of it, generate
    with `forerun.custom_generate`.

    Attributes:
        max_new_tokens: the most tokens to generate. The model's context limits them too.
        temperature: 0 is greedy.
        top_k: sample from the k most probable tokens; 0 samples from all.
        top_p: sample from the smallest set of tokens with this probability.
        min_p: leave out tokens whose probability is below this share of the most probable token's.
        repetition_penalty: divides the scores of tokens that occurred before; 1 is none.
        presence_penalty, frequency_penalty: as OpenAI's, from -2 to 2: subtracted from the scores
            of tokens in the output, the one once and the other for each occurrence. The prompt does
            not count.
        logit_bias: numbers from -100 to 100, by token id, that are added to the scores.
        stop: strings that end the text; none of them appears in it.
        ignore_eos: go on after the end token.
        seed: decides, with the model and the prompt, which tokens are sampled: the same with every
            method and beside any other requests (`forerun.sampling.seeded`). Row i of a batch uses
            stream i of the seed; streams of neighbouring seeds do not overlap. None samples with
            torch's own state, and with the rule that accepts the most drafts.
        response_format: the form of the output, as OpenAI describes it
            (`forerun.sampling.response_format.form_of`). It needs the extra `grammar`.

    Raises:
        ValueError: a value has the wrong type or is out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    stop: str | tuple[str, ...] | list[str] = ()
    ignore_eos: bool = False
    seed: int | None = None
    response_format: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        self._check("max_new_tokens", Integral, lambda n: n >= 1, "at least 1")
        # Sampling between 0 and 0.001 would equal greedy decoding, except that it overflows.
        allowed = "0 (greedy) or at least 0.001"
        self._check("temperature", Real, lambda x: x == 0 or 1e-3 <= x < inf, allowed)
        self._check("top_k", Integral, lambda n: n >= 0, "0 (all) or more")
        self._check("top_p", Real, lambda x: 0 < x <= 1, "above 0 and at most 1")
        self._check("min_p", Real, lambda x: 0 <= x <= 1, "between 0 and 1")
        self._check("repetition_penalty", Real, lambda x: 0 < x < inf, "above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(name, Real, lambda x: -2 <= x <= 2, "between -2 and 2")
        self._check_logit_bias()
        if self.seed is not None:
            self._check("seed", Integral, lambda n: 0 <= n < 2**62, "0 or more and below 2**62")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        form = form_of(self.response_format)
        if form is not None and self.ignore_eos:
            raise ValueError(
                "ignore_eos cannot be given beside response_format, which says where the output "
                "ends"
            )
        # Copies, because the caller may change a mapping or a list later.
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if isinstance(self.response_format, Mapping):
            object.__setattr__(self, "response_format", dict(self.response_format))
        object.__setattr__(self, "stop", self._stop_strings())

    def _check(
        self, name: str, type_: type, is_allowed: Callable[[Any], bool], allowed: str
    ) -> None:
        """Raise ValueError for a field of another type or out of range."""
        _check(name, getattr(self, name), type_, is_allowed, allowed)

    def _check_logit_bias(self) -> None:
        """Raise ValueError for biases that are not numbers from -100 to 100 by token id."""
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(
                f"logit_bias must be numbers by token id, not {type(self.logit_bias).__name__}"
            )
        for token, bias in self.logit_bias.items():
            _check("a token id of logit_bias", token, Integral, lambda n: n >= 0, "0 or more")
            _check("logit_bias", bias, Real, lambda x: -100 <= x <= 100, "between -100 and 100")

    def _stop_strings(self) -> tuple[str, ...]:
        """Return the stop strings as a tuple. Raises ValueError for others than strings."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        is_sequence = isinstance(stop, list | tuple)
        if not is_sequence or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must be strings that are not empty, not {self.stop!r}")
        return tuple(stop)


def _check(
    name: str, value: Any, type_: type, is_allowed: Callable[[Any], bool], allowed: str
) -> None:
    """Raise ValueError for a value of another type or out of range."""
    if isinstance(value, bool) or not isinstance(value, type_):
        kind = "an integer" if type_ is Integral else "a number"
        raise ValueError(f"{name} must be {kind}, not {value!r}")
    if not is_allowed(value):
        raise ValueError(f"{name} must be {allowed}, not {value}")
