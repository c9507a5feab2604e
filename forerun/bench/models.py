"""The prompts, models and decoders of a run."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from forerun.api.build import measured
from forerun.api.layers import layers_for
from forerun.api.load import Decoder, ready
from forerun.api.loading import load_config, load_tokenizer, translation_for
from forerun.backends.heads import HiddenLM
from forerun.bench.datasets import STDLIB, Prompt, dataset_name, front_of, stdlib_prompts, tokenised
from forerun.bench.plan import Plan
from forerun.heads.pre_verifier import PreVerifier
from forerun.methods import Parts
from forerun.model.causal_lm import CausalLM, context_of
from forerun.text.vocabularies import Translation
from forerun.zoo import companion

ROWS = 64  # the fewest that a decoder takes at once
_translation_for = lru_cache(1)(translation_for)


def load_prompts(
    plan: Plan, files: dict[str, list[Prompt]]
) -> tuple[dict[str, list[Prompt]], PreTrainedTokenizerBase | None]:
    """Return token ids of every dataset's prompts, cut at the beginning if they and the output exceed the context, and
    the tokenizer, if prompts or a draft needed one."""
    sets = dict(files)
    texts = any(prompt.tokens is None for prompts in files.values() for prompt in prompts)
    tokenizer = _tokenizer(plan, needed=plan.chat or texts or len(files) < len(plan.datasets))
    front = front_of(tokenizer) if tokenizer is not None else ()
    config = load_config(plan.target, "target", trust_remote_code=plan.trust_remote_code)
    context = min(
        (each for each in (context_of(config), plan.context) if each is not None), default=None
    )
    longest = None if context is None else context - plan.max_new_tokens
    if longest is not None and longest < 1:
        raise ValueError(
            f"max_new_tokens {plan.max_new_tokens} leaves no room for a prompt in the context of {context}"
        )
    datasets = {}
    for name in plan.datasets:
        if name in STDLIB:
            assert tokenizer is not None
            sets[name] = stdlib_prompts(name, tokenizer, plan.prompt_tokens, plan.limit)
        try:
            datasets[dataset_name(name)] = [
                tokenised(prompt, tokenizer, longest, config.vocab_size, front, plan.chat)
                for prompt in sets[name]
            ]
        except ValueError as error:
            raise ValueError(f"dataset {dataset_name(name)!r}: {error}") from None
    return datasets, tokenizer


def _tokenizer(plan: Plan, needed: bool) -> PreTrainedTokenizerBase | None:
    """Return the target's tokenizer; None if there is none and only the draft wanted one. Raises ValueError for a draft
    with another one if a method cannot do with that."""
    if not needed and not plan.needs_draft:
        return None
    try:
        tokenizer = load_tokenizer(plan.target, trust_remote_code=plan.trust_remote_code)
    except ValueError:
        if needed:
            raise
        return None  # it would only show which part of a vocabulary is padding
    translation_of(plan, tokenizer)  # raises before anything long
    return tokenizer


def translation_of(plan: Plan, tokenizer: PreTrainedTokenizerBase | None) -> Translation | None:
    """Return how the plan's draft drafts, if it is needed and has another tokenizer than the target's."""
    if tokenizer is None or plan.draft is None or not plan.needs_draft:
        return None
    return _translation_for(
        tokenizer, plan.draft, plan.strict, trust_remote_code=plan.trust_remote_code
    )


def load_decoders(
    plan: Plan, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[dict[str, Decoder], CausalLM]:
    """Return our own methods on one target and one draft with their fast forwards, and the target."""
    needs_draft, models = any(each.needs_draft for each in plan.ours.values()), plan.models()
    target = ready(plan.target, "target", models)
    draft = ready(plan.draft, "draft", models) if needs_draft and plan.draft is not None else None
    return build_decoders(plan, tokenizer, target, draft), target


def build_decoders(
    plan: Plan, tokenizer: PreTrainedTokenizerBase | None, target: CausalLM, draft: CausalLM | None
) -> dict[str, Decoder]:
    """Return the plan's own methods on this target and draft, with the layer and the heads that they need: those of the
    plan, else those that come with forerun. Raises ValueError for a layer or head that does not fit."""
    translation = translation_of(replace(plan, methods=plan.ours), tokenizer)
    layer: PreVerifier | None = None
    heads = dict[str | None, HiddenLM | None]()
    for each in plan.ours.values():
        own = layer or plan.pre_verifier or companion(plan.target, each.layer)
        head = (
            heads.get(each.head) or plan.heads.get(each.head) or companion(plan.target, each.head)
        )
        layer, heads[each.head] = layers_for([each], target, draft, own, head)
    every = Parts(
        target, draft, layer, head=next((each for each in heads.values() if each is not None), None)
    )
    costs = measured(
        list(plan.ours.values()), every
    )  # one table, so that methods differ by nothing else
    decoders = dict[str, Decoder]()
    for name, method in plan.ours.items():
        decoders[name] = Decoder(
            target,
            tokenizer,
            draft if method.needs_draft else None,
            method,
            plan.guard,
            pre_verifier=layer if method.layer else None,
            head=heads.get(method.head),
            costs=costs,
            translation=translation if method.needs_draft else None,
            max_rows=max(ROWS, plan.batch),
            prefix_bytes=0,  # a prompt that comes again is computed again
        )
    return decoders
