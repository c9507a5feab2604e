"""forerun's drafters as a proposer for vLLM (0.32, method "custom_class"). See docs/guide/vllm.md.

vLLM gives tokens, takes chains of tokens as drafts, and verifies them itself. Nothing here imports
vLLM.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field, fields
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forerun import methods
from forerun.api.load import ready
from forerun.api.loading import check_vocabularies, load_tokenizer, translation_for
from forerun.api.options import ModelOptions
from forerun.engine.acceptance import Verdict
from forerun.engine.draft import Draft
from forerun.engine.sequence import Request, Sequence
from forerun.engine.step import Drafter, RowOutcome
from forerun.kinds import check_kind
from forerun.methods import Method, Parts
from forerun.model.causal_lm import CausalLM

METHODS = ("suffix", "sd", "confidence", "cumulative")  # all except the first need a draft model
PREFILL_CHUNK = 512  # tokens of a prompt that the draft model reads at once
PREFIX_BYTES = 2**28  # of the draft model's keys and values that are kept for later prompts

TokenArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Options:
    """How a proposer drafts. `draft` is a folder, a hub id or a GGUF file."""

    method: Method
    draft: str | None = None
    draft_weights: str | None = "auto"
    device: str | None = None

    @classmethod
    def of(cls, given: Any) -> Options:
        """Return the options of a mapping.

        Its keys are the fields above, of which `method` is a name, and settings of the method. The
        default method is "cumulative" with a draft and "suffix" without one. Raises ValueError that
        names what is unknown, missing or out of range.
        """
        if not isinstance(given, Mapping):
            raise ValueError(
                f"additional_config['forerun'] must be an object of settings, not {given!r}"
            )
        keys = [option.name for option in fields(cls)]
        settings = {key: value for key, value in given.items() if key not in keys}
        options: dict[str, str] = {}
        for key in keys[1:]:
            value = given.get(key)
            if value is None:
                continue
            if not isinstance(value, str):
                raise ValueError(f"{key} must be a name, not {value!r}")
            options[key] = value
        check_kind(options.get("draft_weights"))
        has_draft = "draft" in options
        name = given.get("method") or ("cumulative" if has_draft else "suffix")
        if name not in METHODS:
            raise ValueError(
                f"method {name!r} is not for vLLM, which verifies chains of tokens; there are "
                f"{', '.join(METHODS)}"
            )
        if name == "suffix" and has_draft:
            raise ValueError(f"method {name!r} takes no draft")
        if name != "suffix" and not has_draft:
            raise ValueError(f"method {name!r} needs draft=FOLDER")
        return cls(methods.method(name, **settings), **options)


@dataclass
class Text:
    """A request: its sequence, and the draft that was proposed last."""

    seq: Sequence
    known: TokenArray  # [n] its tokens, to be compared with rows
    draft: list[int] = field(default_factory=list)

    def continues(self, tokens: TokenArray, max_growth: int) -> bool:
        """Return whether a row is this text with at most `max_growth` further tokens."""
        length = len(self.known)
        if not 0 <= len(tokens) - length <= max_growth or tokens[length - 1] != self.known[-1]:
            return False
        return bool((tokens[:length] == self.known).all())


class Texts:
    """Finds the text of each row again, because rows have no names and an engine moves them.

    A row continues a text if it begins with the text. If several requests have the same text, one
    may be taken for another. That changes nothing, because all that is kept of a text follows from
    its tokens.
    """

    def __init__(self, max_growth: int) -> None:
        """`max_growth` is the largest number of tokens by which a text grows between two calls."""
        self.max_growth = max_growth
        self.rows: dict[int, Text] = {}
        self._ids = itertools.count()

    def follow(self, rows: dict[int, TokenArray]) -> tuple[dict[int, Text], list[Text]]:
        """Return the texts that rows [n] continue, by row, and the texts that have ended.

        A text has ended if no row continues it.
        """
        texts: dict[int, Text] = {}
        left = dict(self.rows)
        for row, tokens in rows.items():  # first in its old place, where most rows stay
            if row in left and left[row].continues(tokens, self.max_growth):
                texts[row] = left.pop(row)
        for row, tokens in rows.items():
            if row in texts:
                continue
            for place, text in left.items():
                if text.continues(tokens, self.max_growth):
                    texts[row] = left.pop(place)
                    break
        self.rows = dict(texts)
        return texts, list(left.values())

    def begin(
        self, row: int, tokens: TokenArray, new: int, limit: int, eos: frozenset[int]
    ) -> Text:
        """Return the text of a row that is new. Its last `new` tokens are output."""
        seq = Sequence(Request([int(token) for token in tokens], eos=eos), next(self._ids))
        seq.prompt_length -= new
        seq.limit = limit
        text = Text(seq, tokens.copy())
        self.rows[row] = text
        return text


class Proposer:
    """Drafts by one of forerun's methods.

    vLLM makes a proposer if `speculative_config["model"]` names this class. Its options are
    `additional_config["forerun"]`, see `Options.of`. A draft has at most `num_speculative_tokens`
    tokens, and ends where the method stops.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Raises ValueError for options that are unknown or do not fit together."""
        self._max_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self._target = vllm_config.model_config
        self._limit = int(self._target.max_model_len)
        additional = vllm_config.additional_config
        self._options = Options.of(
            additional.get("forerun", {}) if isinstance(additional, dict) else {}
        )
        self._texts = Texts(self._max_tokens + 1)
        ends = getattr(getattr(self._target, "hf_text_config", None), "eos_token_id", None)
        # Nothing is drafted after an end token.
        self._eos = frozenset([ends] if isinstance(ends, int) else ends or [])
        self._drafter: Drafter | None = None
        self.seconds = 0.0  # spent in `propose` so far

    def load_model(self, *_: Any) -> None:
        """Load the draft model of the options, if they name one.

        Raises ValueError if the model cannot be loaded, or is not for this target.
        """
        options = self._options
        draft = None if options.draft is None else self._load_draft(options.draft)
        target: Any = SimpleNamespace(vocab_size=int(self._target.get_vocab_size()))
        self._drafter = options.method.build(Parts(target, draft, pools={}))

    def _load_draft(self, source: str) -> CausalLM:
        tokenizer = None
        has_tokenizer = getattr(self._target, "tokenizer", None)
        if has_tokenizer and not getattr(self._target, "skip_tokenizer_init", False):
            tokenizer = load_tokenizer(self._target.tokenizer)
            translation_for(tokenizer, source, "vLLM")
        options = self._options
        draft = ready(
            source,
            "draft",
            ModelOptions(draft_weights=options.draft_weights, device=options.device),
        )
        check_vocabularies(int(self._target.get_vocab_size()), draft.vocab_size, tokenizer)
        return draft.fresh(PREFIX_BYTES)

    @torch.inference_mode()
    def propose(
        self,
        sampled_token_ids: AnySequence[AnySequence[int]],
        num_tokens_no_spec: TokenArray,
        token_ids_cpu: TokenArray,
        **_: Any,
    ) -> list[list[int]]:
        """Return a draft for each row.

        The draft is empty for rows without sampled tokens, whose prompts vLLM still reads, and for
        rows that fill the context.

        Args:
            sampled_token_ids: the tokens that were sampled since the last call, by row.
            num_tokens_no_spec: [B] the lengths of the rows, with the sampled tokens.
            token_ids_cpu: [B, context] the tokens of the rows.
        """
        started_at = perf_counter()
        if self._drafter is None:
            self.load_model()
        drafter = self._drafter
        assert drafter is not None
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        lengths = [int(number) for number in num_tokens_no_spec[: len(drafts)]]
        rows = {row: token_ids_cpu[row, :length] for row, length in enumerate(lengths) if length}
        texts, ended = self._texts.follow(rows)
        for text in ended:
            text.seq.finish_reason = "stop"
            drafter.drop(text.seq)
        asking = [row for row in rows if len(sampled_token_ids[row])]
        known = [row for row in asking if row in texts]
        # A new request with the text of an old one has not grown, and has its draft already.
        again = [row for row in known if len(rows[row]) == len(texts[row].known)]
        self._observe(drafter, [(texts[row], rows[row]) for row in known if row not in again])
        for row in asking:
            if row not in texts:
                texts[row] = self._begin(drafter, row, rows[row], len(sampled_token_ids[row]))
        for row in again:
            drafts[row] = list(texts[row].draft)
        live = [row for row in asking if row not in again and len(rows[row]) < self._limit]
        for row in live:
            texts[row].seq.limit = self._limit_of(rows[row])
        if live:
            proposal = drafter.propose([texts[row].seq for row in live])
            assert (
                proposal.memo is None
            )  # the methods above keep none, so none is kept for a later call
            for row, draft in zip(live, proposal.drafts, strict=True):
                assert draft.is_chain
                drafts[row] = texts[row].draft = draft.tokens[1 : self._max_tokens + 1]
        self.seconds += perf_counter() - started_at
        return drafts

    def _begin(self, drafter: Drafter, row: int, tokens: TokenArray, new: int) -> Text:
        """Return the text of a new row, whose prompt the drafter has read."""
        text = self._texts.begin(row, tokens, new, self._limit_of(tokens), self._eos)
        for _chunk in drafter.admit(text.seq, None, PREFILL_CHUNK):
            pass
        return text

    def _limit_of(self, tokens: TokenArray) -> int:
        return min(self._limit, len(tokens) + self._max_tokens + 1)

    def _observe(self, drafter: Drafter, grown: list[tuple[Text, np.ndarray]]) -> None:
        outcomes: list[RowOutcome] = []
        rest: list[tuple[Sequence, list[int]]] = []
        for text, tokens in grown:
            new = [int(token) for token in tokens[len(text.known) :]]
            compared = list(zip(text.draft, new, strict=False))
            accepted = next(
                (n for n, (drafted, token) in enumerate(compared) if drafted != token),
                len(compared),
            )
            rejected = accepted < len(compared)
            last = new[min(accepted, len(new) - 1)]
            verdict = Verdict(list(range(accepted + 1)), last, accepted + rejected, rejected)
            verdict.argmax.extend(new)  # of the target's answers no more is known than its tokens
            draft = Draft.chain(text.seq.tokens[-1], text.draft)
            outcomes.append(RowOutcome(text.seq, draft, verdict))
            text.seq.tokens += new[: accepted + 1]
            rest.append((text.seq, new[accepted + 1 :]))
            text.known = tokens.copy()
            text.draft = []
        if outcomes:
            drafter.observe(outcomes, None)
        for seq, more in rest:
            seq.tokens += more
