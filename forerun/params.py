"""What the user asks of a generation. Needs no torch, so that bad values are refused at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """How to generate. Names as in vLLM and transformers. Stands alone: of the checkpoint's own generation config only
    the end tokens are used; pass a transformers GenerationConfig to have the rest of it.

    Attributes:
        max_new_tokens: most tokens to generate; the model's context is a limit too.
        temperature: 0 is greedy.
        top_k: draw from the k most probable tokens; 0 from all.
        top_p: draw from the smallest set of tokens with this probability.
        min_p: drop tokens less probable than this share of the most probable one.
        repetition_penalty: divides scores of tokens seen before; 1 is none.
        stop: strings that end the text; none of them appears in it.
        ignore_eos: go on behind the end token.
        seed: row i of a batch uses seed + i, whatever its neighbours are. None draws one from torch's own state.

    Raises:
        ValueError: a value out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | tuple[str, ...] | list[str] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        warm = self.temperature >= 1e-3  # anything between is greedy but for rounding, which overflows
        checks = [
            (self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1"),
            (
                warm or self.temperature == 0,
                "temperature",
                self.temperature,
                "0 (greedy) or at least 0.001",
            ),
            (self.top_k >= 0, "top_k", self.top_k, "0 (all) or more"),
            (0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1"),
            (0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1"),
            (self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0"),
            (self.seed is None or 0 <= self.seed < 2**62, "seed", self.seed, "0 or more and below 2**62"),
        ]
        for fine, name, value, allowed in checks:
            if not fine:
                raise ValueError(f"{name} must be {allowed}, not {value}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must be strings that are not empty, not {self.stop!r}")
        object.__setattr__(self, "stop", stop)
