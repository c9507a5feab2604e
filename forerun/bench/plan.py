"""What a run measures and how, checked before anything is loaded. Needs no torch."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from forerun.bench.choose import ASSISTED, BATCHING, STATIC, check_llama, is_llama, on_their_forward, peer_settings
from forerun.bench.datasets import check_datasets, dataset_name
from forerun.bench.roofline import check_costs, read_costs
from forerun.bench.sizes import SHAPES
from forerun.kinds import check_kind, check_way
from forerun.methods import Method
from forerun.params import SamplingParams
from forerun.zoo import EMBEDDED, companion, resolve


@dataclass(frozen=True)
class Plan:
    """One run of the benchmark.

    Attributes:
        methods: by the name that results use; None for what others decode, whose settings are in the name.
        datasets: names and .jsonl files.
        data: file or folder of the public datasets.
        target, draft: hub ids, folders or "embedded"; draft is None where no method needs one.
        limit: prompts a dataset, all where None.
        prompt_tokens: length of the prompts from the standard library.
        guard: leave drafts out while they do not pay; without it methods are measured as they are.
        head: folders of heads over the target's hidden states; the embedded target has one for lyanna.
        pre_verifier: folders of trained layers, for pacer; the embedded pair has its own.
        target_shape, draft_shape: names of SHAPES (forerun/bench/sizes.py): the models' output is then measured at the
            costs of these.
        graphs, draft_tokens: as in `forerun.load`.
        costs: what methods that reckon with costs go by (`forerun.bench.roofline.read_costs`), as if they ran there;
            else what forwards cost here.
        stop_at_eos: end at the end token; without it every method generates exactly max_new_tokens.
        clients: closed loops, of so many requests that are open at once, to measure instead of single batches.
        rate: open loops, of so many requests a second; likewise.
        requests: how many requests each of these loads has.
        new_tokens: the least and the most new tokens of a request of a load, as MIN:MAX.
        chat: prompts are messages, rendered by the target's chat template, as conversations are in any case.
        tune: the setting that is chosen, as METHOD.NAME=VALUE,VALUE; results then have the best value.
    """

    methods: dict[str, Method | None]
    datasets: tuple[str, ...] = ("stdlib-test",)
    data: Path | None = None
    target: str = EMBEDDED
    draft: str | None = None
    dtype: str | None = None
    weights: str | None = None
    draft_weights: str | None = None
    draft_vocabulary: int | None = None
    draft_tokens: str | None = None
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
    pre_verifier: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    target_shape: str | None = None
    draft_shape: str | None = None
    graphs: bool = False
    costs: str | None = None
    clients: tuple[int, ...] = ()
    rate: tuple[float, ...] = ()
    requests: int = 64
    new_tokens: str = "16:256"
    chat: bool = False
    tune: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "rounds", "limit", "prompt_tokens", "requests"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        self.params()
        check_kind(self.weights)
        check_kind(self.draft_weights)
        check_way(self.draft_tokens)
        if self.draft_vocabulary is not None and self.draft_vocabulary < 0:
            raise ValueError(f"draft_vocabulary must be at least 0, not {self.draft_vocabulary}")
        if self.top_p < 1 and not self.temperature:
            raise ValueError(f"top_p {self.top_p} needs a temperature above 0: greedy decoding samples nothing")
        self._check_load()
        for name, each in self.methods.items():
            if self.temperature and each is not None and each.greedy_only:
                raise ValueError(f"method {name!r} is for greedy decoding; leave it out or set the temperature to 0")
            bundled = companion(self.target, each.layer) if each is not None and self.target == self.draft else None
            if each is not None and each.layer and not self.pre_verifier and bundled is None:
                raise ValueError(f"method {name!r} needs a pre-verifier: give --pre-verifier")
            if each is not None and each.head and not self.head and companion(self.target, each.head) is None:
                raise ValueError(f"method {name!r} needs a head: give --head")
        for what, folders in (("pre-verifier", self.pre_verifier), ("head", self.head)):
            for folder in folders:
                if not (Path(folder) / "config.json").is_file():
                    raise ValueError(f"no {what} in the folder {folder!r}")
        for part in ("target", "draft"):
            shape = getattr(self, f"{part}_shape")
            if shape is not None and shape not in SHAPES:
                raise ValueError(f"--{part}-shape must be one of {', '.join(SHAPES)}, not {shape!r}")
        if self.target_shape or self.draft_shape:
            for kind in (self.weights, self.draft_weights):
                if kind in ("bfloat16", "int8", "int4"):
                    raise ValueError(f"weights {kind!r} cannot be measured in another shape; choose float32")
            for name, each in self.methods.items():
                if each is None or on_their_forward(name):
                    raise ValueError(f"method {name!r} cannot be measured in another shape; leave it out")
        if self.costs is not None:
            ours = {name: each for name, each in self.methods.items() if each is not None}
            check_costs(read_costs(self.costs), ours)
        check_datasets(self.datasets, self.data)
        resolve(self.target, "target")
        for name in filter(is_llama, self.methods):
            check_llama(name, self.target, self.batch, self.device)
        if self.needs_draft:
            if self.draft is None:
                needy = next(name for name in self.methods if self._needs_draft(name))
                raise ValueError(f"method {needy!r} needs a draft model: give --draft")
            resolve(self.draft, "draft")

    def _check_load(self) -> None:
        for name in self.methods:
            if self.loaded and (name.startswith("hf-") or is_llama(name)) and name != BATCHING:
                raise ValueError(f"method {name!r} is not for --clients and --rate; {BATCHING} is")
            if not self.loaded and name.split("/")[0] in (BATCHING, STATIC):
                raise ValueError(f"method {name!r} needs --clients or --rate")
        if not self.loaded:
            return
        for option, given in (("--batch", self.batch > 1), ("--tune", self.tune is not None)):
            if given:
                raise ValueError(f"{option} is not for --clients and --rate")
        if min((*self.clients, 1)) < 1 or not min((*self.rate, 1.0)) > 0:
            raise ValueError("--clients must be at least 1 and --rate above 0")
        low, high = self.lengths
        if not 1 <= low <= high:
            raise ValueError(f"--new-tokens must be MIN:MAX with 1 <= MIN <= MAX, not {self.new_tokens!r}")

    @property
    def loaded(self) -> bool:
        """Whether loads are measured."""
        return bool(self.clients or self.rate)

    @property
    def lengths(self) -> tuple[int, int]:
        """The least and the most new tokens of a request of a load."""
        try:
            low, high = map(int, self.new_tokens.split(":"))
        except ValueError:
            raise ValueError(f"--new-tokens takes MIN:MAX, not {self.new_tokens!r}") from None
        return low, high

    @property
    def rows(self) -> int:
        """The most rows that a method of ours may decode at once."""
        return max(64, self.batch, *self.clients)

    def _needs_draft(self, name: str) -> bool:
        settings = self.methods[name]
        return settings.needs_draft if settings is not None else name.startswith(ASSISTED)

    @property
    def needs_draft(self) -> bool:
        return any(map(self._needs_draft, self.methods))

    @property
    def strict(self) -> str | None:
        """A method that needs a draft with the target's tokenizer, if any does."""
        needy = filter(self._needs_draft, self.methods)
        return next((name for name in needy if (own := self.methods[name]) is None or not own.any_tokenizer), None)

    @property
    def reference(self) -> str:
        """Whose greedy output the others are compared with."""
        return "hf-ar" if "hf-ar" in self.methods else "ar"

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
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return plain | {
            "methods": {name: asdict(each) if each else peer_settings(name) for name, each in self.methods.items()},
            "datasets": [dataset_name(dataset) for dataset in self.datasets],
            "data": self.data.name if self.data else None,
            "clients": list(self.clients),
            "rate": list(self.rate),
            "pre_verifier": [model_name(folder) for folder in self.pre_verifier],
            "costs": Path(self.costs).name if self.costs else None,
            "head": [model_name(folder) for folder in self.head],
            "target": model_name(self.target),
            "draft": model_name(self.draft) if self.draft and self.needs_draft else None,
        }

    def command(self) -> str:
        """The command that makes such a run, with names instead of paths."""
        given = self.arguments()
        words = ["forerun", "bench"]
        words += ["--tune", self.tune] if self.tune else ["--methods", ",".join(self.methods)]
        tuned = self.tune.partition("=")[0] if self.tune else None
        settings = {f"{m.name}.{k}": v for m in self.methods.values() if m is not None for k, v in asdict(m).items()}
        words += [word for k, v in settings.items() if k != tuned for word in ("--method-arg", f"{k}={v}")]
        words += ["--dataset", ",".join(given["datasets"])]
        for field in fields(self)[2:-1]:
            value = given[field.name]
            if value is True:
                words.append(_option(field.name))
            elif isinstance(value, list):
                words += [word for each in value for word in (_option(field.name), str(each))]
            elif value not in (None, False, field.default) and (field.name, value) != ("draft", EMBEDDED):
                words += [_option(field.name), str(value)]
        return shlex.join(words)


def check_folder(out: Path | None, resume: bool) -> None:
    """Raises ValueError where a run would overwrite another one or has none to go on from."""
    if resume and out is None:
        raise ValueError("--resume needs --out, the folder of the run to go on with")
    if out is None:
        return
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is not a folder")
    if resume and not (out / "run.json").exists():
        raise ValueError(f"{out} holds no run to resume")
    if not resume and (out / "records.jsonl").exists():
        raise ValueError(f"{out} holds a run already: give --resume or another --out")


def model_name(source: str) -> str:
    """What results call a model: its hub id, or the name of its folder or file."""
    path = Path(source).expanduser()
    return path.resolve().name if path.exists() else source


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")
