"""Transformers as a peer: its own `generate`, and its own forwards for methods of ours.

Its models are loaded apart, so that nothing of ours has touched them. With a temperature its
methods sample with that and top-p, and with nothing else, from a seed for each prompt or batch.

On transformers' forwards models in few bits are in float32: a GGUF file, and drafts, which on a CPU
are otherwise in 8 bits (`--draft-weights float32` makes both sides equal). So outputs may differ
from those of our forwards where rounding decides.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
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
    """Return the tokens that end an output."""
    eos = None if params.ignore_eos else target.generation_config.eos_token_id
    if eos is None:
        return set()
    return {eos} if isinstance(eos, int) else set(eos)


class Generate:
    """A target, and perhaps a draft, with which transformers decodes.

    Their generation configs keep only the special tokens, because a checkpoint's sampling settings
    would make the methods differ. The assistant's config has the same end tokens as the target's:
    without them an assistant falls back on its own and stops drafting there.

    Attributes:
        ends: the tokens that end an output.
        pad: the token that fills short rows.
        assistant: the generation config of an assistant, without a schedule.
    """

    def __init__(
        self, target: PreTrainedModel, draft: PreTrainedModel | None, params: SamplingParams
    ) -> None:
        self.target = target.eval()
        self.draft = draft.eval() if draft is not None else None
        self.params = params
        checkpoint = target.generation_config
        eos = None if params.ignore_eos else checkpoint.eos_token_id
        self.ends = end_tokens(target, params)
        self.pad = checkpoint.pad_token_id
        if self.pad is None:
            self.pad = min(self.ends, default=0)
        special = {
            "bos_token_id": checkpoint.bos_token_id,
            "eos_token_id": eos,
            "pad_token_id": self.pad,
        }
        target.generation_config = GenerationConfig(**special)
        self.assistant = GenerationConfig(**special)
        if draft is not None:
            # The draft checkpoint's values; None stands for transformers' defaults.
            for name in ("num_assistant_tokens", "assistant_confidence_threshold"):
                setattr(self.assistant, name, getattr(draft.generation_config, name, None))
        self._target_forwards = Forwards(target)
        self._draft_forwards = Forwards(draft) if draft is not None else None

    def drawing(self) -> dict[str, Any]:
        """Return how tokens are chosen: by nothing but the temperature and top-p."""
        if not self.params.temperature:
            return {"do_sample": False}
        return {
            "do_sample": True,
            "temperature": self.params.temperature,
            "top_k": 0,
            "top_p": self.params.top_p,
        }

    def config(self, name: str) -> GenerationConfig:
        """Return the generation config of a method, without its assistant's settings."""
        options = self.drawing()
        if name.startswith(HF_LOOKUP):
            options |= peer_settings(name)
        return GenerationConfig(
            max_new_tokens=self.params.max_new_tokens,
            eos_token_id=self.target.generation_config.eos_token_id,
            pad_token_id=self.target.generation_config.pad_token_id,
            **options,
        )

    def run(self, name: str) -> Run:
        """Return the method of that name.

        Where transformers refuses batches, their rows run one after the other.
        """
        config = self.config(name)
        schedule = None
        if name.startswith(ASSISTED):
            # Transformers takes these settings from the assistant's generation config.
            schedule = copy.deepcopy(self.assistant)
            schedule.update(**peer_settings(name))

        def run(
            prompts: Sequence[Sequence[int]], seeds: Sequence[int], warm_up: int | None = None
        ) -> Outcome:
            if not warm_up:
                return self._measured(name, prompts, seeds, config, schedule)
            short = copy.deepcopy(config)
            short.max_new_tokens = warm_up
            return self._measured(name, prompts, seeds, short, copy.deepcopy(schedule))

        return run

    def _measured(
        self,
        name: str,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        config: GenerationConfig,
        schedule: GenerationConfig | None,
    ) -> Outcome:
        """Decode the prompts, and count seconds and forwards."""
        if takes_rows(name):
            groups = [list(range(len(prompts)))]
        else:
            groups = [[row] for row in range(len(prompts))]
        tokens: list[list[int]] = []
        target_forwards = 0
        draft_forwards = 0
        started_at = perf_counter()
        for rows in groups:
            target_before = self._target_forwards.count
            draft_before = self._draft_count()
            torch.manual_seed(seeds[rows[0]])
            tokens += self._generate([prompts[row] for row in rows], config, schedule)
            target_forwards += (self._target_forwards.count - target_before) * len(rows)
            draft_forwards += self._draft_count() - draft_before
        seconds = perf_counter() - started_at
        return Outcome(tokens, seconds, target_forwards, draft_forwards)

    def _draft_count(self) -> int:
        return self._draft_forwards.count if self._draft_forwards is not None else 0

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        config: GenerationConfig,
        schedule: GenerationConfig | None,
    ) -> list[list[int]]:
        width = max(map(len, prompts))
        ids, mask = self._padded(prompts, width)
        with self._assistant_with(schedule) as options:
            output: Any = self.target.generate(
                inputs=ids, attention_mask=mask, generation_config=config, **options
            )
        return [self._until_end(row) for row in output[:, width:].tolist()]

    def _padded(self, prompts: Sequence[Sequence[int]], width: int) -> tuple[Tensor, Tensor]:
        """Return the prompts [R, width], filled on the left, and their attention mask."""
        rows: list[list[int]] = []
        masks: list[list[int]] = []
        for prompt in prompts:
            missing = width - len(prompt)
            rows.append([self.pad] * missing + list(prompt))
            masks.append([0] * missing + [1] * len(prompt))
        device = self.target.device
        return torch.tensor(rows, device=device), torch.tensor(masks, device=device)

    @contextmanager
    def _assistant_with(self, schedule: GenerationConfig | None) -> Iterator[dict[str, Any]]:
        """Give the draft its schedule for one call; yield the options of `generate` for it.

        The number of tokens to draft, and what the heuristic schedule carries to the next call,
        live in the assistant's generation config. So each schedule has a config of its own.
        """
        if schedule is None:
            yield {}
            return
        assert self.draft is not None
        before = self.draft.generation_config
        self.draft.generation_config = schedule
        try:
            yield {"assistant_model": self.draft}
        finally:
            self.draft.generation_config = before

    def _until_end(self, row: list[int]) -> list[int]:
        """Return a row without its padding; rows that end early are filled to the longest."""
        end = next((place for place, token in enumerate(row) if token in self.ends), len(row))
        return row[: end + 1]


def load_peers(plan: Plan, assisted: bool) -> Generate:
    """Return transformers' `generate` of the plan's target, with or without the draft."""
    draft = load_theirs(plan, "draft") if assisted else None
    return Generate(load_theirs(plan, "target"), draft, plan.params())


def load_on_their_forward(
    plan: Plan, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Decoder]:
    """Return the plan's methods on transformers' own forwards of target and draft.

    Beside the same methods on our forwards they show what our forwards are worth.
    """
    draft = CausalLM(load_theirs(plan, "draft")) if plan.needs_draft else None
    return build_decoders(plan, tokenizer, CausalLM(load_theirs(plan, "target")), draft)


def load_theirs(plan: Plan, part: str) -> PreTrainedModel:
    """Return a model as transformers loads it.

    Weights in few bits, for example of a GGUF file, are in float32.
    """
    source = plan.target if part == "target" else plan.draft
    weights = plan.weights if part == "target" else plan.draft_weights
    assert source is not None  # the plan was checked
    # bfloat16 weights mean a bfloat16 model here, on every device.
    dtype = "bfloat16" if weights == "bfloat16" else plan.dtype
    return load_model(
        source,
        part,
        plain=True,
        device=plan.device,
        trust_remote_code=plan.trust_remote_code,
        dtype=dtype,
        weights="float32" if weights == "float32" else None,
    )
