"""Decoders for a run's methods: on our forwards, and on transformers' own beside them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from forerun.api import Decoder
from forerun.bench.choose import on_their_forward
from forerun.bench.models import load_heads, load_layers, load_pair, load_theirs, translation_of
from forerun.bench.plan import Plan
from forerun.bench.roofline import read_costs
from forerun.costs import Costs
from forerun.files import read_text, write_text
from forerun.methods import Lyanna, Method, Pacer
from forerun.model import CausalLM
from forerun.nn.pre_verifier import PreVerifier
from forerun.profiles import costs_of
from forerun.runtime.costs import head_costs, measure_costs
from forerun.runtime.heads import HiddenLM
from forerun.vocabularies import Translation


def load_decoders(
    plan: Plan, tokenizer: PreTrainedTokenizerBase | None, out: Path | None
) -> tuple[dict[str, Decoder], CausalLM, Costs | None]:
    """The methods of ours, on one target and one draft; the target; and what forwards cost: as the plan gives it, else
    on this machine when the run began, where a method or a run with a folder wants to know."""
    plan = _only(plan, on_theirs=False)
    translation = translation_of(plan, tokenizer)
    target, draft = load_pair(plan)
    costs = read_costs(plan.costs) if plan.costs is not None else None
    layers, heads = _trained(plan, target, draft)
    kept = out / "costs.json" if out is not None and plan.costs is None else None
    if kept is not None and kept.exists():
        costs = costs_of(json.loads(read_text(kept)))
    elif costs is None and (kept or any(each is not None and each.needs_costs for each in plan.methods.values())):
        costs = measure_costs(target, draft, layer=layers.get(Pacer.layer), head=heads.get(Lyanna.head))
        if kept is not None:
            write_text(kept, json.dumps(asdict(costs)) + "\n")
    return _decoders(plan, tokenizer, target, draft, costs, layers, heads, translation), target, costs


def load_on_their_forward(plan: Plan, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Decoder]:
    """The methods of ours that run on transformers' own forwards, on a pair of their own: what our forwards are worth.

    A target that is stored in few bits is in float32 there, as for transformers' `generate`.
    """
    plan = _only(plan, on_theirs=True)
    if not plan.methods:
        return {}
    translation = translation_of(plan, tokenizer)
    target, draft = CausalLM(load_theirs(plan, "target")), None
    if plan.needs_draft:
        draft = CausalLM(load_theirs(plan, "draft"))
    layers, heads = _trained(plan, target, draft)
    costs = read_costs(plan.costs) if plan.costs is not None else None
    if costs is None and any(each is not None and each.needs_costs for each in plan.methods.values()):
        costs = measure_costs(target, draft, layer=layers.get(Pacer.layer), head=heads.get(Lyanna.head))
    return _decoders(plan, tokenizer, target, draft, costs, layers, heads, translation)


def _only(plan: Plan, on_theirs: bool) -> Plan:
    """The plan with those methods of ours alone that run on transformers' forwards, or on ours."""
    methods: dict[str, Method | None] = {
        name: each for name, each in plan.methods.items() if each is not None and on_their_forward(name) == on_theirs
    }
    return replace(plan, methods=methods)


def _trained(
    plan: Plan, target: CausalLM, draft: CausalLM | None
) -> tuple[dict[str | None, PreVerifier], dict[str | None, HiddenLM]]:
    return load_layers(plan, target, draft) if draft is not None else {}, load_heads(plan, target)


def _decoders(
    plan: Plan,
    tokenizer: PreTrainedTokenizerBase | None,
    target: CausalLM,
    draft: CausalLM | None,
    costs: Costs | None,
    layers: dict[str | None, PreVerifier],
    heads: dict[str | None, HiddenLM],
    translation: Translation | None,
) -> dict[str, Decoder]:
    decoders = dict[str, Decoder]()
    for name, method in plan.methods.items():
        assert method is not None  # others decode elsewhere
        decoders[name] = decoder = Decoder(
            target,
            tokenizer,
            draft if method.needs_draft else None,
            method,
            plan.guard,
            pre_verifier=layers.get(method.layer),
            head=heads.get(method.head),
            translation=translation if method.needs_draft else None,
            max_rows=plan.rows,
            prefix_bytes=0,  # a prompt that comes again is computed again
        )
        decoder.costs = costs
        if costs is not None and plan.costs is None and method.needs_costs and method.head not in (None, Lyanna.head):
            # The table has those of Lyanna's head, and a state of another one takes another time.
            decoder.costs = replace(costs, head=head_costs(heads[method.head]))
        decoder.tokenizer = None  # making text is no part of what is measured
    return decoders
