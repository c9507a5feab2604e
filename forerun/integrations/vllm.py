"""forerun's drafters as a proposer for vLLM (0.32, method "custom_class"). See docs/vllm.md.

vLLM hands over tokens, takes chains of tokens back, and verifies them itself. Nothing here imports vLLM.
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

METHODS = ("suffix", "sd", "confidence", "cumulative")  # all but the first need a draft
CHUNK = 512  # tokens of a prompt that the draft model reads at once
PREFIX_BYTES = 2**28  # of the draft model's KV that are kept for later prompts


@dataclass(frozen=True)
class Options:
    """How a proposer drafts. `draft` is a folder, hub id or GGUF file."""

    method: Method
    draft: str | None = None
    draft_weights: str | None = "auto"
    device: str | None = None

    @classmethod
    def of(cls, given: Any) -> Options:
        """Return the options of a mapping: the method's name, the fields here, and settings of the method.

        The default method is "suffix", with a draft "cumulative". Raises ValueError that names what is unknown, missing
        or out of range.
        """
        if not isinstance(given, Mapping):
            raise ValueError(
                f"additional_config['forerun'] must be an object of settings, not {given!r}"
            )
        names = [each.name for each in fields(cls)]
        settings = {key: value for key, value in given.items() if key not in names}
        own: dict[str, Any] = {key: given[key] for key in names[1:] if given.get(key) is not None}
        for key, value in own.items():
            if not isinstance(value, str):
                raise ValueError(f"{key} must be a name, not {value!r}")
        check_kind(own.get("draft_weights"))
        name = given.get("method") or ("cumulative" if "draft" in own else "suffix")
        if name not in METHODS:
            known = ", ".join(METHODS)
            raise ValueError(
                f"method {name!r} is not for vLLM, which verifies chains of tokens; there are {known}"
            )
        if (name == "suffix") == ("draft" in own):
            raise ValueError(
                f"method {name!r} " + ("takes no draft" if "draft" in own else "needs draft=FOLDER")
            )
        return cls(methods.method(name, **settings), **own)


@dataclass
class Text:
    """A request: its sequence, and the draft that was proposed last."""

    seq: Sequence
    known: np.ndarray  # [n] its tokens, to be compared with rows
    draft: list[int] = field(default_factory=list)

    def continues(self, tokens: np.ndarray, most: int) -> bool:
        """Return whether a row is this text with at most `most` tokens more."""
        n = len(self.known)
        if not 0 <= len(tokens) - n <= most or tokens[n - 1] != self.known[-1]:
            return False
        return bool((tokens[:n] == self.known).all())


class Texts:
    """Finds each row's text again. Rows have no names, and an engine moves them about.

    A row continues a text that it begins with. If several requests have the same text, either may be taken for the
    other: whatever is kept of a text follows from its tokens.
    """

    def __init__(self, most: int) -> None:
        """`most`: tokens by which a text grows between two calls, at most."""
        self.most, self.rows = most, dict[int, Text]()
        self._ids = itertools.count()

    def follow(self, rows: dict[int, np.ndarray]) -> tuple[dict[int, Text], list[Text]]:
        """Return the texts that rows [n] continue, by row, and the texts that no row continues, which have ended."""
        found, left = dict[int, Text](), dict(self.rows)
        for row, tokens in rows.items():  # most stay where they were
            if row in left and left[row].continues(tokens, self.most):
                found[row] = left.pop(row)
        for row in [row for row in rows if row not in found]:
            old = next(
                (old for old, text in left.items() if text.continues(rows[row], self.most)), None
            )
            if old is not None:
                found[row] = left.pop(old)
        self.rows = dict(found)
        return found, list(left.values())

    def begin(
        self, row: int, tokens: np.ndarray, new: int, limit: int, eos: frozenset[int]
    ) -> Text:
        """Return the text of a row that is new; its last `new` tokens are output."""
        seq = Sequence(Request([int(token) for token in tokens], eos=eos), next(self._ids))
        seq.prompt_length -= new
        seq.limit = limit
        text = self.rows[row] = Text(seq, tokens.copy())
        return text


class Proposer:
    """Drafts by one of forerun's methods. vLLM makes it if `speculative_config["model"]` names this class.

    Options are `additional_config["forerun"]`, see `Options.of`. A draft has at most
    `num_speculative_tokens` tokens, and ends where the method stops.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Raises ValueError for options that are unknown or do not fit together."""
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._target = vllm_config.model_config
        self._limit = int(self._target.max_model_len)
        additional = vllm_config.additional_config
        self._options = Options.of(
            additional.get("forerun", {}) if isinstance(additional, dict) else {}
        )
        self._texts = Texts(self._most + 1)
        ends = getattr(getattr(self._target, "hf_text_config", None), "eos_token_id", None)
        self._eos = frozenset(
            [ends] if isinstance(ends, int) else ends or []
        )  # nothing is drafted after them
        self._drafter: Drafter | None = None
        self.seconds = 0.0  # spent in `propose` so far

    def load_model(self, *_: Any) -> None:
        """Load the draft model of the options. Raises ValueError if it cannot be loaded or is not for this target."""
        options = self._options
        draft = None if options.draft is None else self._load_draft(options.draft)
        target: Any = SimpleNamespace(vocab_size=int(self._target.get_vocab_size()))
        self._drafter = options.method.build(Parts(target, draft, pools={}))

    def _load_draft(self, source: str) -> CausalLM:
        tokenizer = None
        if getattr(self._target, "tokenizer", None) and not getattr(
            self._target, "skip_tokenizer_init", False
        ):
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
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        **_: Any,
    ) -> list[list[int]]:
        """Return a draft for each row. It is empty for rows without sampled tokens, whose prompts vLLM still reads, and
        for those that fill the context.

        `num_tokens_no_spec` [B] counts the tokens of rows `token_ids_cpu` [B, context], the sampled ones included.
        """
        begun = perf_counter()
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
        # A new request with an old one's text has not grown: it is drafted for already.
        again = [row for row in asking if row in texts and len(rows[row]) == len(texts[row].known)]
        self._observe(
            drafter,
            [(texts[row], rows[row]) for row in asking if row in texts and row not in again],
        )
        for row in asking:
            if row not in texts:
                new, limit = len(sampled_token_ids[row]), self._limit_of(rows[row])
                texts[row] = self._texts.begin(row, rows[row], new, limit, self._eos)
                for _chunk in drafter.admit(texts[row].seq, None, CHUNK):
                    pass
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
                drafts[row] = texts[row].draft = draft.tokens[1 : self._most + 1]
        self.seconds += perf_counter() - begun
        return drafts

    def _limit_of(self, tokens: np.ndarray) -> int:
        return min(self._limit, len(tokens) + self._most + 1)

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
            text.known, text.draft = tokens.copy(), []
        if outcomes:
            drafter.observe(outcomes, None)
        for seq, more in rest:
            seq.tokens += more
