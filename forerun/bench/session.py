"""A whole run: prompts, models, measurements, results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from forerun.api import Decoder
from forerun.bench.choose import ASSISTED
from forerun.bench.datasets import STDLIB, Prompt, dataset_name, front_of, stdlib_prompts, tokenised
from forerun.bench.measure import WARM_UP, margins, measure
from forerun.bench.pages import markdown
from forerun.bench.peers import Peers
from forerun.bench.plan import Plan, check_folder
from forerun.bench.records import Records
from forerun.bench.report import results, versions
from forerun.bench.roofline import read_costs
from forerun.bench.runners import Run, decoder_run
from forerun.bench.shapes import difference, expand, expand_head
from forerun.bench.sizes import SHAPES
from forerun.bench.timeline import plot_timeline, step_of
from forerun.costs import Costs
from forerun.files import read_text, write_text
from forerun.lengths.oracle import Truth
from forerun.loading import (
    check_draft_tokenizer,
    load_config,
    load_head,
    load_model,
    load_pre_verifier,
    load_tokenizer,
)
from forerun.methods import Lyanna, Oracle, Pacer, SeeingOracle, SpecDec
from forerun.model import CausalLM, context_of, fingerprint
from forerun.nn.pre_verifier import PreVerifier
from forerun.params import SamplingParams
from forerun.profiles import costs_of, identity
from forerun.runtime import prepare
from forerun.runtime.costs import measure_costs
from forerun.runtime.hidden import HiddenLM
from forerun.zoo import FOLDER, bundled_head


def bench(
    plan: Plan,
    files: dict[str, list[Prompt]],
    out: Path | None = None,
    *,
    resume: bool = False,
    profile: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measures what the plan says and returns the results; with `out` they are also there as files.

    `files` are the prompts of `read_files`.

    Raises:
        ValueError: prompts, models or a folder that cannot be used. Prompts and folder are checked before the models'
            weights are loaded.
    """
    datasets, tokenizer = load_prompts(plan, files)
    facts = {name: _facts(prompts) for name, prompts in datasets.items()}
    records = Records(out / "records.jsonl" if out is not None else None)
    if out is not None:
        table = {"table": asdict(read_costs(plan.costs))} if plan.costs is not None else {}
        _claim(out, plan.arguments() | {"prompts": facts} | _surroundings(plan) | table, resume)
    if resume:
        records.resume(list(plan.methods))
    decoders, runs, reference, costs = _load(plan, tokenizer, out)
    _tell_oracles(plan, runs, datasets, say)
    measure(
        runs,
        datasets,
        records,
        rounds=plan.rounds,
        batch=plan.batch,
        seed=plan.seed,
        reference=plan.reference if not plan.temperature else None,
        max_new_tokens=plan.max_new_tokens,
        warm_up=plan.max_new_tokens if plan.graphs else WARM_UP,  # graphs are recorded as their shapes come
        say=say,
    )
    found = results(plan, facts, records.all, margins(reference, datasets, records.all), costs)
    if out is not None:
        from forerun.bench.plots import save_plots

        write_text(out / "results.json", json.dumps(found, indent=1) + "\n")
        pictures = save_plots(found["methods"], out, profile)
        if profile:
            first = [list(prompt.tokens or ()) for prompt in next(iter(datasets.values()))[: plan.batch]]
            pictures += _timelines(decoders, first, plan.params(), found["methods"], out)
            write_text(out / "results.json", json.dumps(found, indent=1) + "\n")
        write_text(out / "report.md", markdown(found, plan.command(), pictures))
    return found


def _timelines(
    decoders: dict[str, Decoder],
    prompts: list[list[int]],
    params: SamplingParams,
    methods: dict[str, Any],
    out: Path,
) -> list[str]:
    """Draws a step of each method of ours, adds what it comes to, and returns the names of the files."""
    pictures = []
    for name, decoder in decoders.items():
        decoder.pools.clear()  # of phrases, which would know the answer
        found = step_of(decoder, prompts, params)
        if found is not None:
            pictures.append(f"timeline-{name}.png")
            plot_timeline(name, *found, out / pictures[-1])
            methods[name]["timeline"] = {"ms": round(found[1].ms, 3), "busy_ms": round(found[1].busy, 3)}
    return pictures


def load_prompts(
    plan: Plan, files: dict[str, list[Prompt]]
) -> tuple[dict[str, list[Prompt]], PreTrainedTokenizerBase | None]:
    """Token ids of every dataset's prompts, cut in front where they and the output exceed the context, and the
    tokenizer where prompts or a draft needed one."""
    sets = dict(files)
    tokenizer = _tokenizer(plan, needed=_texts(files) or len(files) < len(plan.datasets))
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
                tokenised(prompt, tokenizer, longest, config.vocab_size, front) for prompt in sets[name]
            ]
        except ValueError as error:
            raise ValueError(f"dataset {dataset_name(name)!r}: {error}") from None
    return datasets, tokenizer


def _tokenizer(plan: Plan, needed: bool) -> PreTrainedTokenizerBase | None:
    """The target's tokenizer, compared with the draft's; None where there is none and only the draft wanted one."""
    if not needed and not plan.needs_draft:
        return None
    try:
        tokenizer = load_tokenizer(plan.target, trust_remote_code=plan.trust_remote_code)
    except ValueError:
        if needed:
            raise
        return None  # it would say what of a vocabulary is padding; token ids can be decoded without
    if plan.needs_draft and plan.draft is not None:
        check_draft_tokenizer(tokenizer, plan.draft, trust_remote_code=plan.trust_remote_code)
    return tokenizer


def _texts(files: dict[str, list[Prompt]]) -> bool:
    return any(prompt.text is not None for prompts in files.values() for prompt in prompts)


def _claim(out: Path, arguments: dict[str, Any], resume: bool) -> None:
    """Makes the folder this run's own, or sees that it is."""
    check_folder(out, resume)
    arguments = json.loads(json.dumps(arguments))
    path = out / "run.json"
    if not resume:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot make the folder {out}: {error.strerror}") from None
        write_text(path, json.dumps(arguments, indent=1) + "\n")
        return
    try:
        before = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError):
        before = None
    if not isinstance(before, dict):
        raise ValueError(f"{path} is damaged; give another --out")
    was, now = dict(_leaves(before)), dict(_leaves(arguments))
    for name in sorted(was.keys() | now.keys()):
        if was.get(name) != now.get(name):
            raise ValueError(
                f"{out} holds a run with other arguments: {name} was {json.dumps(was.get(name))}, "
                f"not {json.dumps(now.get(name))}"
            )


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no dict with entries, by its keys with dots between them."""
    if not (isinstance(value, dict) and value):
        yield name, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{name}.{key}" if name else key)


def _surroundings(plan: Plan) -> dict[str, Any]:
    """What a run has to go on with beside its arguments. Not the commit: a run may be mended and gone on with."""
    models = {"target": identity(plan.target, "target")}
    if plan.needs_draft and plan.draft is not None:
        models["draft"] = identity(plan.draft, "draft")
    return {"models": models, "versions": {key: value for key, value in versions().items() if key != "commit"}}


def _how(plan: Plan) -> dict[str, Any]:
    return {"dtype": plan.dtype, "device": plan.device, "trust_remote_code": plan.trust_remote_code}


def load_pair(plan: Plan) -> tuple[CausalLM, CausalLM | None]:
    """The target, and the draft where a method of ours needs it, with their fast forwards."""
    target = _ready(plan, "target")
    if not any(method.needs_draft for method in plan.methods.values() if method is not None):
        return target, None
    assert plan.draft is not None
    return target, _ready(plan, "draft")


def _ready(plan: Plan, part: str) -> CausalLM:
    """The plan's target or draft, in the shape that it asks for. Raises ValueError where that says something else."""
    model, shape = load_model(getattr(plan, part), part, **_how(plan)), getattr(plan, f"{part}_shape")
    if shape is None:
        return prepare(model, in_place=True, graphs=plan.graphs)
    big = expand(model, SHAPES[shape])
    apart, allowed = difference(model, big), 1e-4 if model.dtype == torch.float32 else 0.05
    if not apart <= allowed:
        raise ValueError(f"the {part} in the shape of {shape} says something else: its logits differ by {apart:.2g}")
    ready = prepare(big, in_place=True, graphs=plan.graphs)
    ready.fingerprint = fingerprint(model)  # what was trained for the small one is for this one as well
    return ready


def load_layers(plan: Plan, target: CausalLM, draft: CausalLM) -> dict[str | None, PreVerifier]:
    """The trained layers that the plan's methods need, by what they are for; raises ValueError where one is missing."""
    wanted = {method.layer for method in plan.methods.values() if method is not None and method.layer is not None}
    folders: Sequence[str | Path] = plan.pre_verifier or [FOLDER / name for name in sorted(wanted)]
    found: dict[str | None, PreVerifier] = {}
    for folder in folders if wanted else ():
        layer = load_pre_verifier(folder, target, draft)
        seen = sorted({"hidden", "target", "token"} & set(layer.config.inputs))
        if seen and (plan.target_shape or plan.draft_shape):
            raise ValueError(f"{folder} looks at {seen[0]} states, which another shape makes wider; train one without")
        found |= {each.layer: layer for each in (Pacer, SpecDec) if each.kind == layer.config.kind}
    for name in sorted(wanted - set(found)):
        raise ValueError(f"none of --pre-verifier is for {name}; `forerun train pre-verifier` makes one")
    return found


def load_heads(plan: Plan, target: CausalLM) -> dict[str | None, HiddenLM]:
    """The heads over hidden states that the plan's methods need, by kind. Raises ValueError where one is missing."""
    wanted = sorted({method.head for method in plan.methods.values() if method is not None and method.head})
    bundled = [bundled_head(plan.target, kind) for kind in wanted]
    folders = [*filter(None, bundled), *map(Path, plan.head)] if wanted else []
    heads = [load_head(folder, target) for folder in folders]
    if heads and plan.target_shape is not None:
        small = load_model(plan.target, "target", **_how(plan))
        heads = [expand_head(head, small, SHAPES[plan.target_shape]) for head in heads]
    found: dict[str | None, HiddenLM] = {head.config.kind: HiddenLM(head, target) for head in heads}
    for kind in wanted:
        if kind not in found:
            raise ValueError(f"none of --head is of the kind {kind}; `forerun train lyanna --kind {kind}` makes one")
    return found


def _load(
    plan: Plan, tokenizer: PreTrainedTokenizerBase | None, out: Path | None
) -> tuple[dict[str, Decoder], dict[str, Run], CausalLM, Costs | None]:
    """Methods of ours, what runs each method, the model that says the reference's output, and what forwards cost: of
    this machine when the run began, where a method or a run that is kept wants to know, or as the plan gives it.

    All methods of ours share one target and one draft; transformers' own get plain models of their own.
    """
    how = _how(plan)
    target, draft = load_pair(plan)
    theirs = [name for name, method in plan.methods.items() if method is None]
    peers = None
    if theirs:
        assistant = None
        if any(name.startswith(ASSISTED) for name in theirs):
            assert plan.draft is not None
            assistant = load_model(plan.draft, "draft", **how)
        peers = Peers(load_model(plan.target, "target", **how), assistant, plan.params())
    decoders: dict[str, Decoder] = {}
    runs: dict[str, Run] = {}
    truth, layers = Truth(), {}
    if draft is not None:
        layers = load_layers(plan, target, draft)
    heads = load_heads(plan, target)
    costs = read_costs(plan.costs) if plan.costs is not None else None
    kept = out / "costs.json" if out is not None and plan.costs is None else None
    if kept is not None and kept.exists():
        costs = costs_of(json.loads(read_text(kept)))
    elif costs is None and (kept or any(each is not None and each.needs_costs for each in plan.methods.values())):
        costs = measure_costs(target, draft, layer=layers.get(Pacer.layer), head=heads.get(Lyanna.head))
        if kept is not None:
            write_text(kept, json.dumps(asdict(costs)) + "\n")
    for name, method in plan.methods.items():
        if method is None:
            assert peers is not None
            runs[name] = peers.run(name)
        else:
            drafting = draft if method.needs_draft else None
            layer = layers.get(method.layer)
            head = heads.get(method.head)
            decoders[name] = decoder = Decoder(
                target, tokenizer, drafting, method, plan.guard, pre_verifier=layer, head=head
            )
            decoder.costs = costs
            decoder.tokenizer = None  # making text is no part of what is measured
            decoder.truth = truth
            runs[name] = decoder_run(decoder, plan.params())
    return decoders, runs, CausalLM(peers.target) if peers is not None else target, costs


def _tell_oracles(
    plan: Plan, runs: dict[str, Run], datasets: dict[str, list[Prompt]], say: Callable[[str], None]
) -> None:
    """Runs oracles once on everything, so that no measurement holds the time in which they learn the truth."""
    for name, method in plan.methods.items():
        if not isinstance(method, Oracle | SeeingOracle):
            continue
        for dataset, prompts in datasets.items():
            say(f"{name} learns what the target says to {dataset}")
            for start in range(0, len(prompts), plan.batch):
                rows = [list(prompt.tokens or ()) for prompt in prompts[start : start + plan.batch]]
                runs[name](rows, [plan.seed + row for row in range(len(rows))], None)


def _facts(prompts: list[Prompt]) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps([(prompt.id, prompt.tokens) for prompt in prompts]).encode()).hexdigest()
    return {"prompts": len(prompts), "cut": sum(prompt.cut for prompt in prompts), "sha256": digest[:16]}
