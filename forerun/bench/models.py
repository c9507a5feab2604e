"""The prompts, models and decoders of a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.bench.choose import ASSISTED, is_llama
from forerun.bench.datasets import STDLIB, Prompt, dataset_name, front_of, stdlib_prompts, tokenised
from forerun.bench.peers import Peers
from forerun.bench.plan import Plan
from forerun.bench.shapes import difference, expand, expand_head
from forerun.bench.sizes import SHAPES
from forerun.loading import (
    load_config,
    load_head,
    load_model,
    load_pre_verifier,
    load_tokenizer,
    translation_for,
)
from forerun.model import CausalLM, context_of, fingerprint
from forerun.nn.pre_verifier import PreVerifier
from forerun.runtime import prepare
from forerun.runtime.heads import HiddenLM
from forerun.runtime.hot import prepare_draft
from forerun.vocabularies import Translation
from forerun.zoo import companion, resolve


def load_prompts(
    plan: Plan, files: dict[str, list[Prompt]]
) -> tuple[dict[str, list[Prompt]], PreTrainedTokenizerBase | None]:
    """Token ids of every dataset's prompts, cut in front where they and the output exceed the context, and the
    tokenizer where prompts or a draft needed one."""
    sets = dict(files)
    tokenizer = _tokenizer(plan, needed=plan.chat or _texts(files) or len(files) < len(plan.datasets))
    front = front_of(tokenizer) if tokenizer is not None else ()
    config = load_config(plan.target, "target", trust_remote_code=plan.trust_remote_code)
    contexts = [context_of(config)]
    if any(name.startswith(ASSISTED) for name in plan.methods) and plan.draft is not None:
        # Our drafter stops where its model's context ends; transformers' assistant does not.
        draft = load_config(plan.draft, "draft", trust_remote_code=plan.trust_remote_code)
        contexts.append(context_of(draft))
        if draft.vocab_size != config.vocab_size:  # transformers refuses them after loading, ours allow padding
            raise ValueError(
                f"{ASSISTED} needs vocabularies of one size; the draft's has {draft.vocab_size} entries, the target's "
                f"{config.vocab_size}"
            )
    context = min((each for each in contexts if each is not None), default=None)
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
                tokenised(prompt, tokenizer, longest, config.vocab_size, front, plan.chat) for prompt in sets[name]
            ]
        except ValueError as error:
            raise ValueError(f"dataset {dataset_name(name)!r}: {error}") from None
    return datasets, tokenizer


def _tokenizer(plan: Plan, needed: bool) -> PreTrainedTokenizerBase | None:
    """The target's tokenizer; None where there is none and only the draft wanted one. Raises ValueError for a draft
    with another one where a method cannot do with that."""
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
    """How the plan's draft drafts, where it is needed and has another tokenizer than the target's."""
    if tokenizer is None or plan.draft is None or not plan.needs_draft:
        return None
    return _translation(tokenizer, plan.draft, plan.draft_tokens or "auto", plan.strict, plan.trust_remote_code)


@lru_cache(1)
def _translation(
    tokenizer: PreTrainedTokenizerBase, draft: str, way: str, strict: str | None, trust: bool
) -> Translation | None:
    return translation_for(tokenizer, draft, way, strict, trust_remote_code=trust)


def _texts(files: dict[str, list[Prompt]]) -> bool:
    return any(prompt.tokens is None for prompts in files.values() for prompt in prompts)


def _how(plan: Plan, part: str) -> dict[str, Any]:
    how = {"dtype": plan.dtype, "device": plan.device, "trust_remote_code": plan.trust_remote_code}
    few = plan.draft_weights or ("auto" if plan.draft_shape is None else None)
    return how | {"weights": plan.weights if part == "target" else few}


def load_pair(plan: Plan) -> tuple[CausalLM, CausalLM | None]:
    """The target, and the draft where a method of ours needs it, with their fast forwards."""
    target = _ready(plan, "target")
    if not any(method.needs_draft for method in plan.methods.values() if method is not None):
        return target, None
    assert plan.draft is not None
    return target, _ready(plan, "draft")


def _ready(plan: Plan, part: str) -> CausalLM:
    """The plan's target or draft, in the shape that it asks for. Raises ValueError where that changes its logits."""
    model, shape = load_model(getattr(plan, part), part, **_how(plan, part)), getattr(plan, f"{part}_shape")
    if shape is None and part == "draft":
        assert plan.draft is not None
        return prepare_draft(model, resolve(plan.draft, part), plan.draft_vocabulary, in_place=True, graphs=plan.graphs)
    if shape is None:
        return prepare(model, in_place=True, graphs=plan.graphs)
    big = expand(model, SHAPES[shape])
    apart, allowed = difference(model, big), 1e-4 if model.dtype == torch.float32 else 0.05
    if not apart <= allowed:
        raise ValueError(f"the {part} in the shape of {shape} has other logits: they differ by {apart:.2g}")
    ready = prepare(big, in_place=True, graphs=plan.graphs)
    ready.fingerprint = fingerprint(model)  # what was trained for the small one is for this one as well
    return ready


def load_layers(plan: Plan, target: CausalLM, draft: CausalLM) -> dict[str | None, PreVerifier]:
    """The trained layers that the plan's methods need, by what they are for; raises ValueError where one is missing."""
    wanted = {method.layer for method in plan.methods.values() if method is not None and method.layer is not None}
    bundled = [companion(plan.target, name) for name in sorted(wanted)]
    folders: Sequence[str | Path] = plan.pre_verifier or [*filter(None, bundled)]
    found: dict[str | None, PreVerifier] = {}
    for folder in folders if wanted else ():
        layer = load_pre_verifier(folder, target, draft)
        seen = sorted({"hidden", "target", "token"} & set(layer.config.inputs))
        if seen and (plan.target_shape or plan.draft_shape):
            raise ValueError(f"{folder} looks at {seen[0]} states, which another shape makes wider; train one without")
        found |= {each.layer: layer for each in plan.methods.values() if each and each.kind == layer.config.kind}
    for name in sorted(wanted - set(found)):
        raise ValueError(f"none of --pre-verifier is for {name}; `forerun train pre-verifier` makes one")
    return found


def load_heads(plan: Plan, target: CausalLM) -> dict[str | None, HiddenLM]:
    """The heads over hidden states that the plan's methods need, by kind. Raises ValueError where one is missing."""
    wanted = sorted({method.head for method in plan.methods.values() if method is not None and method.head})
    bundled = [companion(plan.target, kind) for kind in wanted]
    folders = [*filter(None, bundled), *map(Path, plan.head)] if wanted else []
    heads = [load_head(folder, target) for folder in folders]
    if heads and plan.target_shape is not None:
        small = load_model(plan.target, "target", **_how(plan, "target"))
        heads = [expand_head(head, small, SHAPES[plan.target_shape]) for head in heads]
    found: dict[str | None, HiddenLM] = {head.config.kind: HiddenLM(head, target) for head in heads}
    for kind in wanted:
        if kind not in found:
            raise ValueError(f"none of --head is of the kind {kind}; `forerun train lyanna --kind {kind}` makes one")
    return found


def heads_of(
    source: str, target: CausalLM, folder: Path | None, kinds: Sequence[str | None]
) -> dict[str | None, HiddenLM]:
    """Heads for a target, by kind: that of a folder first, then those of these kinds that come with forerun.

    Raises ValueError for a folder's head that does not fit, or is of another kind.
    """
    found: dict[str | None, HiddenLM] = {}
    if folder is not None:
        head = load_head(folder, target)
        if head.config.kind not in kinds:
            wanted = " or ".join(map(str, kinds))
            raise ValueError(f"the head '{folder}' is of the kind {head.config.kind!r}; it must be {wanted}")
        found[head.config.kind] = HiddenLM(head, target)
    for kind in kinds:
        if kind not in found and (own := companion(source, kind)) is not None:
            found[kind] = HiddenLM(load_head(own, target, kind), target)
    return found


def load_peers(plan: Plan) -> Peers | None:
    """Models of transformers' own, where the plan has methods of theirs: nothing of ours has touched these."""
    theirs = [name for name, method in plan.methods.items() if method is None and not is_llama(name)]
    if not theirs:
        return None
    assistant = None
    if any(name.startswith(ASSISTED) for name in theirs):
        assert plan.draft is not None
        assistant = load_theirs(plan, "draft")
    return Peers(load_theirs(plan, "target"), assistant, plan.params())


def load_theirs(plan: Plan, part: str) -> PreTrainedModel:
    """A model as transformers would load it: a GGUF file in float32."""
    weights = plan.weights if part == "target" else plan.draft_weights
    how = _how(plan, part) | {"weights": weights if weights in ("float32", "bfloat16") else None}
    if how["weights"] == "bfloat16":  # not ours, whatever the device
        how |= {"weights": None, "dtype": "bfloat16"}
    return load_model(getattr(plan, part), part, plain=True, **how)
