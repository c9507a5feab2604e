"""What a run measures and how, checked before anything is loaded.

It needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.api.choose import kind_of
from forerun.api.options import ModelOptions
from forerun.bench.datasets import check_datasets, dataset_name
from forerun.methods import METHODS, Method, is_method, parse_value
from forerun.methods import method as make_method
from forerun.sampling.params import SamplingParams
from forerun.zoo import EMBEDDED, ModelSource, companion, own_draft

if TYPE_CHECKING:
    from forerun.bench.measure import Loaded, Run

DEFAULT_METHODS = ("ar", "sd", "suffix")


@dataclass(frozen=True)
class Runner:
    """Another program, or another way to run a method of ours, to measure beside our methods.

    Attributes:
        make: returns what decodes; called once, with the prompts and the target.
        settings: the settings that results name.
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
        methods: what is measured, by the name in results.
        datasets: names and .jsonl or .jsonl.gz files.
        target: hub id, folder or "embedded".
        draft: the same; None if no method needs a draft.
        limit: prompts per dataset; None for all.
        prompt_tokens: length of the prompts from the standard library.
        guard: leave drafts out while they do not pay; without it methods are measured as they are.
        head: folders of heads over the target's hidden states; the embedded target has one for
            lyanna.
        pre_verifier: folder of the trained layer for pacer; the pairs that come with forerun have
            one.
        stop_at_eos: stop at the end token; without it every method generates exactly
            max_new_tokens.
        chat: texts are rendered as messages by the target's chat template; conversations always
            are.
        tune: the setting whose values are compared, as METHOD.NAME=VALUE,VALUE; results then have
            the best value.
        context: the most tokens of prompt and output, if that is less than the target's context.
        reference: the method with whose greedy output all methods are compared.
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
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.params()
        self.models()
        if self.top_p < 1 and not self.temperature:
            raise ValueError(
                f"top_p {self.top_p} needs a temperature above 0: greedy decoding samples nothing"
            )
        self._check_folders()
        self._check_layers()
        check_datasets(self.datasets)
        ModelSource.parse(self.target, "target").check()
        self._check_draft()

    def _check_folders(self) -> None:
        """Raise ValueError for a folder without a trained layer."""
        folders: list[tuple[str, str | Path | None]] = [("pre-verifier", self.pre_verifier)]
        folders += [("head", head) for head in self.head]
        for what, folder in folders:
            if folder is not None and not (Path(folder) / "config.json").is_file():
                raise ValueError(f"no {what} in the folder {str(folder)!r}")

    def _check_layers(self) -> None:
        """Raise ValueError if a method lacks its trained layer, or if no method needs a head."""
        for name, method in self.ours.items():
            if method.layer and not self.pre_verifier and not self._has_pre_verifier(method):
                raise ValueError(f"method {name!r} needs a pre-verifier: give --pre-verifier")
            kind = method.head
            if kind and kind not in self.heads and companion(self.target, kind) is None:
                raise ValueError(f"method {name!r} needs a head of the kind {kind}: give --head")
        wanted = {method.head for method in self.ours.values() if method.head}
        if not wanted:
            return
        for kind, path in self.heads.items():
            if kind not in wanted:
                raise ValueError(
                    f"the head {path!r} is of the kind {kind!r}; it must be "
                    f"{' or '.join(sorted(wanted))}"
                )

    def _has_pre_verifier(self, method: Method) -> bool:
        """Return whether the pair comes with the layer that a method needs."""
        if self.draft != own_draft(self.target):
            return False
        return companion(self.target, method.layer) is not None

    def _check_draft(self) -> None:
        """Raise ValueError if there is no draft and a method needs one."""
        needy = next((name for name, method in self.methods.items() if method.needs_draft), None)
        if needy is None:
            return
        if self.draft is None:
            raise ValueError(f"method {needy!r} needs a draft model: give --draft")
        ModelSource.parse(self.draft, "draft").check()

    @property
    def ours(self) -> dict[str, Method]:
        """Return the methods that run on our decoders."""
        return {
            name: method for name, method in self.methods.items() if not isinstance(method, Runner)
        }

    @cached_property
    def heads(self) -> dict[str | None, str]:
        """Return the folders of heads by their kinds."""
        return {kind_of(folder): folder for folder in self.head}

    @property
    def needs_draft(self) -> bool:
        """Return whether a method runs the draft."""
        return any(method.needs_draft for method in self.methods.values())

    @property
    def strict(self) -> str | None:
        """Return in words a method that requires a draft with the target's tokenizer, or None."""
        for name, method in self.methods.items():
            if method.needs_draft and not method.any_tokenizer:
                return f"method {name!r}"
        return None

    def models(self) -> ModelOptions:
        """Return how models are loaded."""
        names = [option.name for option in fields(ModelOptions)]
        return ModelOptions(**{name: vars(self)[name] for name in names if name in vars(self)})

    def params(self) -> SamplingParams:
        """Return how outputs are sampled."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            ignore_eos=not self.stop_at_eos,
            seed=self.seed,
        )

    def arguments(self) -> dict[str, Any]:
        """Return everything for JSON.

        There are names instead of paths, and the methods' settings as they are used.
        """
        plain = {argument.name: getattr(self, argument.name) for argument in fields(self)}
        return plain | {
            "methods": {
                name: method.settings if isinstance(method, Runner) else asdict(method)
                for name, method in self.methods.items()
            },
            "datasets": [dataset_name(dataset) for dataset in self.datasets],
            "pre_verifier": model_name(str(self.pre_verifier)) if self.pre_verifier else None,
            "head": [model_name(folder) for folder in self.head],
            "target": model_name(self.target),
            "draft": model_name(self.draft) if self.draft and self.needs_draft else None,
        }


# Returns what runs by a name that no method of ours has, or None. The second argument makes a
# method of ours by its name.
RunnerOf = Callable[[str, Callable[[str], Method]], Method | Runner | None]


def parse_methods(
    names: Sequence[str],
    settings: Sequence[str],
    tune: str | None,
    tuned: dict[str, dict[str, Any]],
    runner_of: RunnerOf | None = None,
) -> dict[str, Method | Runner]:
    """Return the methods of --methods, --method-arg and --tune, which always include `ar`.

    Args:
        names: the names of --methods.
        settings: the settings of --method-arg.
        tune: the setting of --tune, if any.
        tuned: settings that replace a method's defaults, but not what is given.
        runner_of: makes what has no name of a method of ours.

    Raises:
        ValueError: a method or a setting is unknown, or they do not fit together.
    """
    given: dict[str, dict[str, Any]] = {}
    for setting in settings:
        name, key, values = _setting("--method-arg", setting)
        given.setdefault(name, {})[key] = parse_value(name, key, values)
    if tune is not None:
        if names:
            raise ValueError("--tune chooses the methods itself; leave out --methods")
        return _tuned_methods(tune, given)
    used = set()

    def ours(name: str) -> Method:
        used.add(name)
        return make_method(name, **tuned.get(name, {}) | given.get(name, {}))

    wanted = [name for name in names or DEFAULT_METHODS if name]
    chosen: dict[str, Method | Runner] = {}
    for name in wanted if "ar" in wanted else ["ar", *wanted]:
        other = runner_of(name, ours) if runner_of is not None and not is_method(name) else None
        chosen[name] = other or ours(name)  # which raises for unknown names
    for name in given:
        if name not in used:
            raise ValueError(
                f"--method-arg {name}.{next(iter(given[name]))}: method {name!r} is not among "
                "--methods"
            )
    return chosen


def _tuned_methods(tune: str, given: dict[str, dict[str, Any]]) -> dict[str, Method | Runner]:
    """Return a method with each value of a setting, and `ar`."""
    name, key, values = _setting("--tune", tune)
    chosen: dict[str, Method | Runner] = {"ar": METHODS["ar"]()}
    for value in values.split(","):
        settings = given.get(name, {}) | {key: parse_value(name, key, value)}
        chosen[f"{name}.{key}={value}"] = make_method(name, **settings)
    return chosen


def _setting(option: str, text: str) -> tuple[str, str, str]:
    """Return the method, the name and the value of METHOD.NAME=VALUE."""
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
    """Return the name of a model in results: its hub id, or the name of its folder or file."""
    path = Path(source).expanduser()
    return path.resolve().name if path.exists() else source
