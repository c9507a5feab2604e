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

MIN_DECODER_ROWS = 64  # a decoder takes at least so many rows at once
_translation_for = lru_cache(1)(translation_for)


def load_prompts(
    plan: Plan, files: dict[str, list[Prompt]]
) -> tuple[dict[str, list[Prompt]], PreTrainedTokenizerBase | None]:
    """Return every dataset's prompts as token ids, and the tokenizer, if one was needed.

    Prompts or a draft may need it. A prompt is cut at the beginning if it and the output exceed the
    context.

    Raises:
        ValueError: a prompt does not fit, or a method cannot use the draft's tokenizer.
    """
    sets = dict(files)
    texts = any(prompt.tokens is None for prompts in files.values() for prompt in prompts)
    tokenizer = _tokenizer(plan, needed=plan.chat or texts or len(files) < len(plan.datasets))
    front = front_of(tokenizer) if tokenizer is not None else ()
    config = load_config(plan.target, "target", trust_remote_code=plan.trust_remote_code)
    longest = _longest_prompt(plan, context_of(config))
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


def _longest_prompt(plan: Plan, model_context: int | None) -> int | None:
    """Return the most tokens of a prompt, or None if no context is known."""
    known = [limit for limit in (model_context, plan.context) if limit is not None]
    if not known:
        return None
    longest = min(known) - plan.max_new_tokens
    if longest < 1:
        raise ValueError(
            f"max_new_tokens {plan.max_new_tokens} leaves no room for a prompt in the context of "
            f"{min(known)}"
        )
    return longest


def _tokenizer(plan: Plan, needed: bool) -> PreTrainedTokenizerBase | None:
    """Return the target's tokenizer; None if there is none and only the draft asked for one.

    Raises:
        ValueError: the draft has another tokenizer, and a method requires the target's.
    """
    if not needed and not plan.needs_draft:
        return None
    try:
        tokenizer = load_tokenizer(plan.target, trust_remote_code=plan.trust_remote_code)
    except ValueError:
        if needed:
            raise
        return None  # it would only show which part of a vocabulary is padding
    translation_of(plan, tokenizer)  # so that it raises before anything that takes long
    return tokenizer


def translation_of(plan: Plan, tokenizer: PreTrainedTokenizerBase | None) -> Translation | None:
    """Return the translation between the draft's and the target's tokens.

    It is None if the plan needs no draft, or if both have one tokenizer.
    """
    if tokenizer is None or plan.draft is None or not plan.needs_draft:
        return None
    return _translation_for(
        tokenizer, plan.draft, plan.strict, trust_remote_code=plan.trust_remote_code
    )


def load_decoders(
    plan: Plan, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[dict[str, Decoder], CausalLM]:
    """Return our own methods on one target and one draft, and the target.

    The models have their fast forwards.
    """
    models = plan.models()
    target = ready(plan.target, "target", models)
    draft = None
    if plan.draft is not None and any(method.needs_draft for method in plan.ours.values()):
        draft = ready(plan.draft, "draft", models)
    return build_decoders(plan, tokenizer, target, draft), target


def build_decoders(
    plan: Plan, tokenizer: PreTrainedTokenizerBase | None, target: CausalLM, draft: CausalLM | None
) -> dict[str, Decoder]:
    """Return the plan's own methods on this target and draft.

    They get the layer and the heads that they need: those of the plan, else those that come with
    forerun.

    Raises:
        ValueError: a layer or a head does not fit.
    """
    translation = translation_of(replace(plan, methods=plan.ours), tokenizer)
    layer: PreVerifier | None = None
    heads = dict[str | None, HiddenLM | None]()
    for method in plan.ours.values():
        kind = method.head
        given_layer = layer or plan.pre_verifier or companion(plan.target, method.layer)
        given_head = heads.get(kind) or plan.heads.get(kind) or companion(plan.target, kind)
        layer, heads[kind] = layers_for([method], target, draft, given_layer, given_head)
    some_head = next((head for head in heads.values() if head is not None), None)
    parts = Parts(target, draft, layer, head=some_head)
    # One table for all, so that methods do not differ by the costs that were measured.
    costs = measured(list(plan.ours.values()), parts)
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
            max_rows=max(MIN_DECODER_ROWS, plan.batch),
            prefix_bytes=0,  # a prompt that comes again is computed again
        )
    return decoders
