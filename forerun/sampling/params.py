"""What the user asks of a generation.

It needs no torch, so that bad values are refused before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from numbers import Integral, Real
from typing import Any

from forerun.sampling.response_format import form_of

# Scores over a smaller temperature may overflow, and sampling would be greedy but for rounding.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """How to generate. Names as in vLLM and transformers.

    Of the checkpoint's generation config only the end tokens are used. `forerun.custom_generate`
    uses all of it.

    Attributes:
        max_new_tokens: the most tokens to generate. The model's context is a limit too.
        min_new_tokens: before so many tokens no end token is generated, none of `stop_token_ids`,
            and no stop string ends the text: one that they complete stays in it, as in vLLM.
        temperature: 0 is greedy.
        top_k: sample from the k most probable tokens; 0 from all.
        top_p: sample from the smallest set of tokens with this probability.
        min_p: leave out tokens less probable than this share of the most probable one.
        typical_p: sample from the smallest set of tokens with this probability whose information
            is closest to the entropy (Meister et al., arXiv 2202.00666); 1 is all.
        repetition_penalty: divides scores of tokens seen before; 1 is none.
        presence_penalty: from -2 to 2, as in OpenAI's API: subtracted once from the score of each
            token that is in the output. The prompt does not count.
        frequency_penalty: the same, subtracted for each occurrence of the token.
        logit_bias: what is added to the scores of some token ids, from -100 to 100.
        stop: strings that end the text; none of them appears in it.
        stop_token_ids: token ids that end the text like the end token, also with `ignore_eos`.
        ignore_eos: go on after the end token.
        seed: with a seed, model and prompt decide what is sampled: the same tokens by every method
            and beside any other rows (`forerun.sampling.seeded`). Row i of a batch uses stream i of
            the seed; streams of neighbouring seeds do not overlap. With None, torch's random state
            decides, and drafts are accepted by the rule that accepts most of them.
        response_format: the form of the output, as in OpenAI's API
            (`forerun.sampling.response_format.form_of`). It needs the extra `grammar`.

    Raises:
        ValueError: a value of the wrong type or out of range.
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
    typical_p: float = 1.0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] | list[int] = ()

    def __post_init__(self) -> None:
        _check("max_new_tokens", self.max_new_tokens, Integral, lambda n: n >= 1, "at least 1")
        _check(
            "temperature",
            self.temperature,
            Real,
            lambda x: x == 0 or MIN_TEMPERATURE <= x < inf,
            f"0 (greedy) or at least {MIN_TEMPERATURE:f}".rstrip("0"),
        )
        _check("top_k", self.top_k, Integral, lambda n: n >= 0, "0 (all) or more")
        _check("top_p", self.top_p, Real, lambda x: 0 < x <= 1, "above 0 and at most 1")
        _check("min_p", self.min_p, Real, lambda x: 0 <= x <= 1, "between 0 and 1")
        _check("typical_p", self.typical_p, Real, lambda x: 0 < x <= 1, "above 0 and at most 1")
        _check(
            "repetition_penalty", self.repetition_penalty, Real, lambda x: 0 < x < inf, "above 0"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _check(name, getattr(self, name), Real, lambda x: -2 <= x <= 2, "between -2 and 2")
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(
                f"logit_bias must be numbers by token id, not {type(self.logit_bias).__name__}"
            )
        for token, bias in self.logit_bias.items():
            _check("a token id of logit_bias", token, Integral, lambda n: n >= 0, "0 or more")
            _check("logit_bias", bias, Real, lambda x: -100 <= x <= 100, "between -100 and 100")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.seed is not None:
            _check(
                "seed", self.seed, Integral, lambda n: 0 <= n < 2**62, "0 or more and below 2**62"
            )
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        self._check_form()
        self._check_ends()

    def _check_form(self) -> None:
        """Check the response format, which says itself where the output ends."""
        form = form_of(self.response_format)
        if isinstance(self.response_format, Mapping):
            object.__setattr__(self, "response_format", dict(self.response_format))
        for name in ("ignore_eos", "min_new_tokens"):
            if form is not None and getattr(self, name):
                raise ValueError(
                    f"{name} cannot be given with response_format, which says where the output ends"
                )

    def _check_ends(self) -> None:
        """Check what ends the text, and turn lists into tuples."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if not isinstance(stop, list | tuple) or not all(
            isinstance(text, str) and text for text in stop
        ):
            raise ValueError(f"stop must be strings that are not empty, not {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stop))
        if not isinstance(self.stop_token_ids, list | tuple):
            raise ValueError(f"stop_token_ids must be token ids, not {self.stop_token_ids!r}")
        for token in self.stop_token_ids:
            _check("a token id of stop_token_ids", token, Integral, lambda n: n >= 0, "0 or more")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        most = self.max_new_tokens
        _check(
            "min_new_tokens",
            self.min_new_tokens,
            Integral,
            lambda n: 0 <= n <= most,
            f"from 0 to max_new_tokens, which is {most}",
        )


def _check(name: str, value: Any, type_: type, fits: Callable[[Any], bool], allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, type_):
        raise ValueError(
            f"{name} must be {'an integer' if type_ is Integral else 'a number'}, not {value!r}"
        )
    if not fits(value):
        raise ValueError(f"{name} must be {allowed}, not {value}")
