"""forerun's drafters as a proposer for vLLM (0.32, method "custom_class"). docs/vllm.md says how to use it.

vLLM hands over tokens and takes chains of tokens back; it verifies them itself. Nothing here imports vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from forerun.api.layers import config_file, load_pre_verifier
from forerun.api.loading import check_draft_tokenizer, check_vocabularies, load_model, load_tokenizer
from forerun.backends.hot import prepare_draft
from forerun.engine.acceptance import Verdict
from forerun.engine.draft import Draft
from forerun.engine.step import Drafter
from forerun.heads.pre_verifier import PreVerifier
from forerun.integrations.options import read
from forerun.integrations.texts import Text, Texts, agreed, chain_of
from forerun.methods import Parts
from forerun.model.causal_lm import CausalLM
from forerun.zoo import resolve

CHUNK = 512  # tokens of a prompt that the draft model reads at once
PREFIX_BYTES = 2**28  # of the draft model's KV that are kept for later prompts
UNSEEN = ("entropy", "top")  # inputs of a pre-verifier that vLLM does not hand over


class Proposer:
    """Drafts by one of forerun's methods. vLLM makes it where `speculative_config["model"]` is
    "forerun.integrations.vllm.Proposer".

    Options are `additional_config["forerun"]`, see `forerun.integrations.options.read`. A draft has at most
    `num_speculative_tokens` tokens, and ends where the method says.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Raises ValueError for options that are unknown or do not fit together."""
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._target = vllm_config.model_config
        self._limit = int(self._target.max_model_len)
        additional = vllm_config.additional_config
        self._options = read(additional.get("forerun", {}) if isinstance(additional, dict) else {})
        self._texts = Texts(self._most + 1)
        self._eos = _end_tokens(getattr(self._target, "hf_text_config", None))
        self._drafter: Drafter | None = None
        self.seconds = 0.0  # spent in `propose` so far

    def load_model(self, *_: Any) -> None:
        """Loads the draft model and the pre-verifier, where there are any.

        Raises ValueError for what cannot be loaded, and for a draft or a layer that belongs to another target."""
        options = self._options
        draft = None if options.draft is None else self._load_draft(options.draft)
        layer = None if draft is None else self._load_layer(draft)
        target: Any = SimpleNamespace(vocab_size=int(self._target.get_vocab_size()))
        self._drafter = options.method.build(Parts(target, draft, layer, pools={}))

    def _load_draft(self, source: str) -> CausalLM:
        tokenizer = None
        if getattr(self._target, "tokenizer", None) and not getattr(self._target, "skip_tokenizer_init", False):
            tokenizer = load_tokenizer(self._target.tokenizer)
            check_draft_tokenizer(tokenizer, source)
        weights, device = self._options.draft_weights, self._options.device
        on_gpu = not (device or ("cuda" if torch.cuda.is_available() else "cpu")).startswith("cpu")
        model = load_model(source, "draft", weights=None if on_gpu and weights == "auto" else weights, device=device)
        check_vocabularies(int(self._target.get_vocab_size()), model.config.get_text_config().vocab_size, tokenizer)
        folder = resolve(source, "draft")
        return prepare_draft(model, folder, None, fast=True, in_place=True).fresh(PREFIX_BYTES)

    def _load_layer(self, draft: CausalLM) -> PreVerifier | None:
        source = self._options.pre_verifier
        if source is None:
            return None
        kind = self._options.method.kind
        layer = load_pre_verifier(source, _shape_of(self._target, source, draft.device), draft, kind)
        unseen = [name for name in layer.config.inputs if name in UNSEEN]
        if unseen:
            raise ValueError(
                f"the pre-verifier {source!r} reads {unseen[0]!r} of the target, which vLLM does not hand over; train "
                "one without it (forerun train pre-verifier --inputs)"
            )
        return layer

    @torch.inference_mode()
    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        **_: Any,
    ) -> list[list[int]]:
        """A draft for each row; empty for rows without sampled tokens, whose prompts vLLM still reads, and for those
        that fill the context.

        `num_tokens_no_spec` [B] counts the tokens of rows `token_ids_cpu` [B, context], the sampled ones included.
        """
        begun = perf_counter()
        if self._drafter is None:
            self.load_model()
        drafter = self._drafter
        assert drafter is not None
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows = {
            row: token_ids_cpu[row, : int(num_tokens_no_spec[row])]
            for row in range(len(sampled_token_ids))
            if num_tokens_no_spec[row]
        }
        found, ended = self._texts.follow(rows)
        for text in ended:
            text.seq.finish_reason = "stop"
            drafter.drop(text.seq)
        asking = [row for row, new in enumerate(sampled_token_ids) if len(new) and row in rows]
        # A text that has not grown, as of a new request with an old one's text, is drafted for already.
        again = {row for row in asking if row in found and len(rows[row]) == len(found[row].known)}
        self._observe(drafter, [(found[row], rows[row]) for row in asking if row in found and row not in again])
        for row in asking:
            if row not in found:
                tokens, new = rows[row], len(sampled_token_ids[row])
                text = self._texts.begin(row, tokens, new, min(self._limit, len(tokens) + self._most + 1), self._eos)
                found[row] = text
                for _chunk in drafter.admit(text.seq, None, CHUNK):
                    pass
        for row in again:
            drafts[row] = list(found[row].draft)
        live = [row for row in asking if row not in again and len(rows[row]) < self._limit]
        for row in live:
            seq = found[row].seq
            seq.limit = min(self._limit, len(seq.tokens) + self._most + 1)
        if live:
            proposal = drafter.propose([found[row].seq for row in live])
            for row, draft in zip(live, proposal.drafts, strict=True):
                drafts[row] = found[row].draft = chain_of(draft)[: self._most]
        self.seconds += perf_counter() - begun
        return drafts

    def _observe(self, drafter: Drafter, grown: list[tuple[Text, np.ndarray]]) -> None:
        """Tells the drafter what came of its drafts."""
        seqs, drafts, verdicts, rest = [], [], [], []
        for text, tokens in grown:
            new = [int(token) for token in tokens[len(text.known) :]]
            accepted = agreed(text.draft, new)
            seqs.append(text.seq)
            drafts.append(Draft.chain(text.seq.tokens[-1], text.draft))
            rejected = accepted < min(len(text.draft), len(new))
            verdict = Verdict(
                list(range(accepted + 1)), new[min(accepted, len(new) - 1)], accepted + rejected, rejected
            )
            # Nothing but the target's own tokens are known of its answers.
            verdict.argmax.extend(new)
            verdicts.append(verdict)
            text.seq.tokens += new[: accepted + 1]
            rest.append((text.seq, new[accepted + 1 :]))
            text.known, text.draft = tokens.copy(), []
        if seqs:
            drafter.observe(seqs, drafts, verdicts, None)
        for seq, more in rest:
            seq.tokens += more


def _end_tokens(config: Any) -> frozenset[int]:
    """Tokens that end a text, by the target's configuration; behind them nothing is drafted."""
    ends = getattr(config, "eos_token_id", None)
    return frozenset([] if ends is None else [ends] if isinstance(ends, int) else map(int, ends))


def _shape_of(model_config: Any, source: str, device: torch.device) -> Any:
    """What a layer's target is compared with: vLLM's, of which the shape is known and no weights are."""
    config = model_config.hf_text_config
    stored = json.loads(config_file(Path(source), f"the pre-verifier {source!r}").read_text())
    names = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
    weights = [None] * len(stored.get("target", {}).get("weights", ()))
    shape = {name: getattr(config, name, None) for name in names} | {"weights": weights}
    return SimpleNamespace(fingerprint=shape, device=device)
