"""Transformers' own `generate` as a method among the others, and its own forwards for methods of ours, on models that
nothing of ours has touched."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.peers.runners import ASSISTED, HF_LOOKUP, peer_settings, takes_rows
from forerun.api.load import Decoder
from forerun.api.loading import load_model
from forerun.bench.measure import Outcome, Run
from forerun.bench.models import build_decoders
from forerun.bench.plan import Plan
from forerun.model.causal_lm import CausalLM
from forerun.sampling.params import SamplingParams


class Forwards:
    """Counts the forwards of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.count = 0
        model.register_forward_pre_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1


def end_tokens(target: PreTrainedModel, params: SamplingParams) -> set[int]:
    """The tokens that end an output."""
    eos = None if params.ignore_eos else target.generation_config.eos_token_id
    return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)


class Generate:
    """A target, and perhaps a draft, that transformers decodes with.

    Their generation configs keep only the special tokens, so that a checkpoint's sampling settings do not make the
    methods differ. Without end tokens there in both, an assistant falls back on its own and drafts no further.
    """

    def __init__(
        self, target: PreTrainedModel, draft: PreTrainedModel | None, params: SamplingParams
    ) -> None:
        self.target, self.draft, self.params = (
            target.eval(),
            draft.eval() if draft is not None else None,
            params,
        )
        theirs = target.generation_config
        eos = None if params.ignore_eos else theirs.eos_token_id
        self.ends = end_tokens(target, params)
        self.pad = (
            theirs.pad_token_id if theirs.pad_token_id is not None else min(self.ends, default=0)
        )
        special = {
            "bos_token_id": theirs.bos_token_id,
            "eos_token_id": eos,
            "pad_token_id": self.pad,
        }
        target.generation_config = GenerationConfig(**special)
        self.assistant = GenerationConfig(**special)
        if draft is not None:  # the checkpoint's own, or None for transformers' defaults
            for name in ("num_assistant_tokens", "assistant_confidence_threshold"):
                setattr(self.assistant, name, getattr(draft.generation_config, name, None))
        self.of_target = Forwards(target)
        self.of_draft = Forwards(draft) if draft is not None else None

    def drawing(self) -> dict[str, Any]:
        """How tokens are chosen: nothing but the temperature and top-p."""
        asked = self.params
        if not asked.temperature:
            return {"do_sample": False}
        return {
            "do_sample": True,
            "temperature": asked.temperature,
            "top_k": 0,
            "top_p": asked.top_p,
        }

    def config(self, name: str) -> GenerationConfig:
        """How `generate` is asked for a method, beside its assistant."""
        options = self.drawing()
        special = {
            key: getattr(self.target.generation_config, key)
            for key in ("eos_token_id", "pad_token_id")
        }
        options |= (
            peer_settings(name) if name.startswith(HF_LOOKUP) else {}
        )  # of the assistant's are asked for there
        return GenerationConfig(max_new_tokens=self.params.max_new_tokens, **special, **options)

    def run(self, name: str) -> Run:
        """The method of that name; batches go through row by row where transformers refuses them."""
        config = self.config(name)
        schedule = None
        if name.startswith(ASSISTED):
            schedule = copy.deepcopy(self.assistant)
            schedule.update(**peer_settings(name))  # transformers asks the assistant's

        def run(
            prompts: Sequence[Sequence[int]], seeds: Sequence[int], warm_up: int | None = None
        ) -> Outcome:
            asked, own = config, schedule
            if warm_up:
                asked, own = copy.deepcopy(config), copy.deepcopy(schedule)
                asked.max_new_tokens = warm_up
            groups = (
                [[row] for row in range(len(prompts))]
                if not takes_rows(name)
                else [list(range(len(prompts)))]
            )
            tokens: list[list[int]] = []
            begun = perf_counter()
            draft_forwards = target_forwards = 0
            for rows in groups:
                before = self.of_target.count, self.of_draft.count if self.of_draft else 0
                torch.manual_seed(seeds[rows[0]])
                tokens += self._generate([prompts[row] for row in rows], asked, own)
                target_forwards += (self.of_target.count - before[0]) * len(rows)
                draft_forwards += (self.of_draft.count if self.of_draft else 0) - before[1]
            return Outcome(tokens, perf_counter() - begun, target_forwards, draft_forwards)

        return run

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        config: GenerationConfig,
        schedule: GenerationConfig | None,
    ) -> list[list[int]]:
        width, device = max(map(len, prompts)), self.target.device
        ids = torch.tensor(
            [[self.pad] * (width - len(row)) + list(row) for row in prompts], device=device
        )
        mask = torch.tensor(
            [[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=device
        )
        options: dict[str, Any] = {}
        if schedule is not None:
            assert self.draft is not None
            # The number of tokens to draft, and what the heuristic schedule carries to the next call, live in the
            # assistant's generation config: each schedule has one of its own, put there for the call.
            before, self.draft.generation_config = self.draft.generation_config, schedule
            options["assistant_model"] = self.draft
        try:
            output: Any = self.target.generate(
                inputs=ids, attention_mask=mask, generation_config=config, **options
            )
        finally:
            if schedule is not None and self.draft is not None:
                self.draft.generation_config = before
        return [self._until_end(row) for row in output[:, width:].tolist()]

    def _until_end(self, row: list[int]) -> list[int]:
        """Rows of a batch that end early are padded to the longest."""
        end = next((i for i, token in enumerate(row) if token in self.ends), len(row))
        return row[: end + 1]


def load_peers(plan: Plan, assisted: bool) -> Generate:
    """Transformers' own `generate` of the plan's target, with its draft as an assistant or without."""
    return Generate(
        load_theirs(plan, "target"), load_theirs(plan, "draft") if assisted else None, plan.params()
    )


def load_on_their_forward(
    plan: Plan, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Decoder]:
    """The plan's methods on transformers' own forwards, on a pair of their own: what our forwards are worth."""
    draft = CausalLM(load_theirs(plan, "draft")) if plan.needs_draft else None
    return build_decoders(plan, tokenizer, CausalLM(load_theirs(plan, "target")), draft)


def load_theirs(plan: Plan, part: str) -> PreTrainedModel:
    """A model as transformers would load it: weights in few bits, as in a GGUF file, are in float32."""
    source, weights = (
        (plan.target, plan.weights) if part == "target" else (plan.draft, plan.draft_weights)
    )
    assert source is not None  # the plan was checked
    how: dict[str, Any] = {
        "dtype": plan.dtype,
        "weights": "float32" if weights == "float32" else None,
    }
    if weights == "bfloat16":  # not ours, whatever the device
        how["dtype"] = "bfloat16"
    trust = plan.trust_remote_code
    return load_model(source, part, plain=True, device=plan.device, trust_remote_code=trust, **how)
