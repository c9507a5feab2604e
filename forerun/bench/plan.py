"""What a run measures and how, checked before anything is loaded. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.api.choose import kind_of
from forerun.api.options import ModelOptions
from forerun.bench.datasets import check_datasets, dataset_name
from forerun.methods import METHODS, Method, is_method, method, parse_value
from forerun.sampling.params import SamplingParams
from forerun.zoo import EMBEDDED, companion, locate, own_draft

if TYPE_CHECKING:
    from forerun.bench.measure import Loaded, Run

DEFAULT_METHODS = ("ar", "sd", "suffix")


@dataclass(frozen=True)
class Runner:
    """Another program, or another way to run a method of ours, to measure in the same run as our methods.

    Attributes:
        make: returns what decodes; called once, with the prompts and the target.
        settings: what results say that it ran with.
        needs_draft: whether it runs the plan's draft.
        any_tokenizer: whether that draft may have another tokenizer than the target.
        one_by_one: whether it decodes the rows of a batch one after the other.
        knows: whether it can have read the beginning of a prompt before.
    """

    make: Callable[[Loaded], Run]
    settings: dict[str, Any] = field(default_factory=dict)
    needs_draft: bool = False
    any_tokenizer: bool = False
    one_by_one: bool = False
    knows: bool = False


@dataclass(frozen=True)
class Plan:
    """One run of the benchmark.

    Attributes:
        methods: what is measured, by the name that results use.
        datasets: names and .jsonl or .jsonl.gz files.
        target, draft: hub ids, folders or "embedded"; draft is None if no method needs one.
        limit: prompts a dataset; None for all.
        prompt_tokens: length of the prompts from the standard library.
        guard: leave drafts out while they do not pay; without it methods are measured as they are.
        head: folders of heads over the target's hidden states; the embedded target has one for lyanna.
        pre_verifier: folder of the trained layer, for pacer; the pairs that come with forerun have their own.
        stop_at_eos: end at the end token; without it every method generates exactly max_new_tokens.
        chat: prompts are messages, rendered by the target's chat template, as conversations are in any case.
        tune: the setting that is chosen, as METHOD.NAME=VALUE,VALUE; results then have the best value.
        context: most tokens of prompt and output, if that is less than the target takes.
        reference: the method whose greedy output all methods are compared with.
    """

    methods: Mapping[str, Method | Runner]
    datasets: tuple[str, ...] = ("stdlib-test",)
    target: str = EMBEDDED
    draft: str | None = None
    dtype: str | None = None
    weights: str | None = None
    draft_weights: str | None = None
    draft_vocabulary: int | None = None
    device: str | None = None
    threads: int | None = None
    trust_remote_code: bool = False
    temperature: float = 0.0
    max_new_tokens: int = 128
    batch: int = 1
    rounds: int = 2
    limit: int | None = None
    seed: int = 0
    prompt_tokens: int = 128
    stop_at_eos: bool = False
    guard: bool = False
    top_p: float = 1.0
    pre_verifier: Path | None = None
    head: tuple[str, ...] = ()
    chat: bool = False
    tune: str | None = None
    context: int | None = None
    reference: str = "ar"

    def __post_init__(self) -> None:
        for name in ("batch", "rounds", "limit", "prompt_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        self.params()
        self.models()
        if self.top_p < 1 and not self.temperature:
            raise ValueError(
                f"top_p {self.top_p} needs a temperature above 0: greedy decoding samples nothing"
            )
        for what, folder in (
            ("pre-verifier", self.pre_verifier),
            *(("head", each) for each in self.head),
        ):
            if folder is not None and not (Path(folder) / "config.json").is_file():
                raise ValueError(f"no {what} in the folder {str(folder)!r}")
        for name, each in self.ours.items():
            bundled = (
                companion(self.target, each.layer) if self.draft == own_draft(self.target) else None
            )
            if each.layer and not self.pre_verifier and bundled is None:
                raise ValueError(f"method {name!r} needs a pre-verifier: give --pre-verifier")
            if (
                each.head
                and each.head not in self.heads
                and companion(self.target, each.head) is None
            ):
                raise ValueError(
                    f"method {name!r} needs a head of the kind {each.head}: give --head"
                )
        wanted = {each.head for each in self.ours.values() if each.head}
        for kind, path in self.heads.items() if wanted else ():
            if kind not in wanted:
                raise ValueError(
                    f"the head {path!r} is of the kind {kind!r}; it must be {' or '.join(sorted(wanted))}"
                )
        check_datasets(self.datasets)
        locate(self.target, "target")
        if self.needs_draft:
            if self.draft is None:
                needy = next(name for name, each in self.methods.items() if each.needs_draft)
                raise ValueError(f"method {needy!r} needs a draft model: give --draft")
            locate(self.draft, "draft")

    @property
    def ours(self) -> dict[str, Method]:
        """The methods that run on our decoders."""
        return {name: each for name, each in self.methods.items() if not isinstance(each, Runner)}

    @cached_property
    def heads(self) -> dict[str | None, str]:
        """The folders of heads by their kinds."""
        return {kind_of(folder): folder for folder in self.head}

    @property
    def needs_draft(self) -> bool:
        return any(each.needs_draft for each in self.methods.values())

    @property
    def strict(self) -> str | None:
        """A method that needs a draft with the target's tokenizer, in words, or None."""
        needy = (
            f"method {name!r}"
            for name, each in self.methods.items()
            if each.needs_draft and not each.any_tokenizer
        )
        return next(needy, None)

    def models(self) -> ModelOptions:
        names = [each.name for each in fields(ModelOptions)]
        return ModelOptions(**{name: vars(self)[name] for name in names if name in vars(self)})

    def params(self) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            ignore_eos=not self.stop_at_eos,
            seed=self.seed,
        )

    def arguments(self) -> dict[str, Any]:
        """Everything for JSON: names instead of paths, the methods' settings as they are used."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return plain | {
            "methods": {
                name: each.settings if isinstance(each, Runner) else asdict(each)
                for name, each in self.methods.items()
            },
            "datasets": [dataset_name(dataset) for dataset in self.datasets],
            "pre_verifier": model_name(str(self.pre_verifier)) if self.pre_verifier else None,
            "head": [model_name(folder) for folder in self.head],
            "target": model_name(self.target),
            "draft": model_name(self.draft) if self.draft and self.needs_draft else None,
        }


# Returns what runs by a name that no method of ours has, or None. The second argument makes a method of ours.
RunnerOf = Callable[[str, Callable[[str], Method]], Method | Runner | None]


def parse_methods(
    names: Sequence[str],
    settings: Sequence[str],
    tune: str | None,
    tuned: dict[str, dict[str, Any]],
    runner_of: RunnerOf | None = None,
) -> dict[str, Method | Runner]:
    """Return the methods of --methods, --method-arg and --tune, `ar` always among them.

    `tuned` holds settings that take the place of a method's defaults, not of what is given. `runner_of` makes what has
    no name of a method of ours.
    """
    given: dict[str, dict[str, Any]] = {}
    for setting in settings:
        name, key, values = _setting("--method-arg", setting)
        given.setdefault(name, {})[key] = parse_value(name, key, values)
    if tune is not None:
        if names:
            raise ValueError("--tune chooses the methods itself; leave out --methods")
        name, key, values = _setting("--tune", tune)
        chosen: dict[str, Method | Runner] = {"ar": METHODS["ar"]()}
        for value in values.split(","):
            chosen[f"{name}.{key}={value}"] = method(
                name, **given.get(name, {}) | {key: parse_value(name, key, value)}
            )
        return chosen
    used = set()

    def ours(name: str) -> Method:
        used.add(name)
        return method(name, **tuned.get(name, {}) | given.get(name, {}))

    wanted = [name for name in names or DEFAULT_METHODS if name]
    chosen = {}
    for name in wanted if "ar" in wanted else ["ar", *wanted]:
        other = runner_of(name, ours) if runner_of is not None and not is_method(name) else None
        chosen[name] = other or ours(name)  # which raises for unknown names
    for name in given:
        if name not in used:
            raise ValueError(
                f"--method-arg {name}.{next(iter(given[name]))}: method {name!r} is not among --methods"
            )
    return chosen


def _setting(option: str, text: str) -> tuple[str, str, str]:
    left, equals, value = text.partition("=")
    name, dot, key = left.rpartition(".")
    if not (equals and dot and name and key and value):
        raise ValueError(f"{option} takes METHOD.NAME=VALUE, not {text!r}")
    if not is_method(name):
        raise ValueError(
            f"{option} {left}: {name!r} is no method with settings; there are {', '.join(METHODS)}"
        )
    return name, key, value


def model_name(source: str) -> str:
    """Return what results call a model: its hub id, or the name of its folder or file."""
    path = Path(source).expanduser()
    return path.resolve().name if path.exists() else source
