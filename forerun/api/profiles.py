"""Profiles: what `forerun tune` measured for a pair of models on this machine, in a file that later runs read.

A profile holds what forwards cost and, for greedy decoding and for sampling, the method that was fastest. Nothing in it
can change greedy output, nor the distribution of sampled output. Importing this needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from forerun.engine.costs import Costs, costs_of
from forerun.files import home, read_text, write_text
from forerun.methods import Method, is_method, method, method_class, settings_of
from forerun.zoo import FOLDERS, locate, own_draft, weight_files

Mode = Literal["greedy", "sampling"]


@dataclass(frozen=True)
class Pair:
    """What a profile is for: models, and what they run on.

    Attributes:
        target, draft: names, for people to read; no draft if none was given.
        device: "cpu" or the name of the GPU.
        dtype: of the weights, or what they are stored as; "auto" is what the checkpoint has.
        threads: of a CPU; 0 elsewhere.
        models: differs between models of one name, see `_identity`.
    """

    target: str
    draft: str | None
    device: str
    dtype: str
    threads: int
    models: str

    @property
    def path(self) -> Path:
        key = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]
        return home() / "profiles" / f"{key}.json"


@dataclass(frozen=True)
class Choice:
    """The fastest method for one way to decode.

    Attributes:
        method, settings: what was chosen.
        measured_speedup: over plain decoding, the median over prompts.
        temperature, top_p: what it was chosen for.
        tuned: {method: settings} the best settings of every method that was tried.
        prompts: what it was chosen on.
        pre_verifier, head: the folders of the layer and the head that were tried with it, unless these are the
            embedded pair's own.
        date: in UTC.
    """

    method: str
    settings: dict[str, Any]
    measured_speedup: float
    temperature: float
    top_p: float
    tuned: dict[str, dict[str, Any]]
    prompts: dict[str, Any]
    pre_verifier: str | None
    head: str | None
    date: str

    def build(self) -> Method:
        return method(self.method, **self.settings)


@dataclass(frozen=True)
class Profile:
    """One file of these; a mode that was never tuned is None."""

    pair: Pair
    versions: dict[str, Any]
    costs: Costs
    greedy: Choice | None = None
    sampling: Choice | None = None

    def choice(self, temperature: float) -> Choice | None:
        return self.sampling if temperature else self.greedy


def _identity(source: str | Path, part: str) -> Any:
    """Return what differs between models of one name: a hub id, or a folder's config and weight files with sizes."""
    folder = locate(source, part)
    if not isinstance(folder, Path):
        return folder
    if folder.is_file():
        return {folder.name: folder.stat().st_size}
    config = folder / "config.json"
    return {
        "config.json": hashlib.sha256(config.read_bytes()).hexdigest()[:16] if config.is_file() else None,
        **{path.name: path.stat().st_size for path in weight_files(folder)},
    }


class Loading(Protocol):
    """How models are loaded: what differs between profiles of the same models."""

    @property
    def device(self) -> str | None: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def weights(self) -> str | None: ...
    @property
    def draft_weights(self) -> str | None: ...


def pair_of(target: str | Path, draft: str | Path | None, how: Loading) -> Pair:
    """Return the pair with the device and dtype that `forerun.load` would give it, and torch's present threads.

    Raises ValueError for folders that do not exist.
    """
    import torch

    device = how.device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = device.partition(":")[0]
    shown = kind
    if kind == "cuda":
        with suppress(RuntimeError, AssertionError, ValueError):  # loading will report what is wrong with the device
            shown = torch.cuda.get_device_name(device if ":" in device else None)
    weights, draft_weights = (None if each == "auto" else each for each in (how.weights, how.draft_weights))
    stored = str(how.dtype or weights or ("float32" if kind == "cpu" else "auto")).removeprefix("torch.")
    models: dict[str, Any] = {}
    for part, source in (("target", target), ("draft", draft)):
        if source is not None:
            # Fine-tuned copies of one model differ only inside their files: the folder distinguishes them.
            folder = Path(source).expanduser()
            where = None if source in FOLDERS or not folder.exists() else str(folder.resolve())
            models[part] = [where, _identity(source, part)]
    return Pair(
        target=_name(target),
        draft=_name(draft) if draft is not None else None,
        device=shown,
        dtype=", ".join([stored, *([f"draft {draft_weights}"] if draft_weights else [])]),
        threads=torch.get_num_threads() if kind == "cpu" else 0,
        models=hashlib.sha256(json.dumps(models).encode()).hexdigest()[:16],
    )


def find(pair: Pair) -> Profile | None:
    """Return the profile of a pair, None if it was not tuned. Raises ValueError for a damaged one."""
    return read(pair.path) if os.path.isfile(pair.path) else None  # False too if the user may not look there


def read(path: Path) -> Profile:
    """Read a profile. Raises ValueError naming the file if it is none."""
    text = read_text(path)
    try:
        return _profile(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = f" ({error})" if isinstance(error, ValueError) else ""
        raise ValueError(
            f"the profile {path} is damaged or of another version{why}: run `forerun tune` again or delete it"
        ) from None


def save(pair: Pair, mode: Mode, choice: Choice, costs: Costs, versions: dict[str, Any]) -> Path:
    """Write one mode's choice, whole or not at all, and keep the other's; return the file.

    Raises ValueError if nothing can be written there.
    """
    try:
        old = read(pair.path)
    except ValueError:  # none yet, or one that is made anew
        old = Profile(pair, versions, costs)
    new = replace(old, pair=pair, versions=versions, costs=costs, **{mode: choice})
    try:
        pair.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(pair.path, json.dumps(asdict(new), indent=1) + "\n")
    except OSError as error:
        raise ValueError(f"cannot write {pair.path}: {error.strerror}; FORERUN_HOME may name another folder") from None
    return pair.path


@dataclass(frozen=True)
class Shipped:
    """What comes with a model that forerun knows by name: chosen on one machine and validation prompts. A profile goes
    before it.

    Attributes:
        methods: {"greedy" or "sampling": {method: {setting: value}}}.
        default: the method of each of the two, if none is named.
        costs: of forwards. With these the pair's methods do the same things everywhere.
    """

    methods: dict[str, dict[str, dict[str, Any]]]
    default: dict[str, str]
    costs: Costs | None

    def choice(self, mode: Mode) -> Method | None:
        """Return the default method with its settings."""
        name = self.default.get(mode)
        return method(name, **self.methods.get(mode, {}).get(name, {})) if name is not None else None


def shipped(target: object, draft: object) -> Shipped | None:
    """Return what comes with forerun for a target and its own draft; None for other models."""
    own = own_draft(target)  # None if it is not fetched
    folder = FOLDERS.get(str(target)) if own is not None and draft in (None, own) else None
    if folder is None or not (path := folder / "tuned.json").is_file():
        return None
    found = json.loads(read_text(path))
    costs = costs_of(found["costs"]) if "costs" in found else None
    return Shipped({mode: found.get(mode, {}) for mode in ("greedy", "sampling")}, found.get("default", {}), costs)


def _name(source: str | Path) -> str:
    folder = Path(source).expanduser()
    return folder.resolve().name if source not in FOLDERS and folder.exists() else str(source)


def _profile(found: dict[str, Any]) -> Profile:
    """Return a profile from JSON. Raises ValueError, TypeError or AttributeError for what is none."""
    choices = {mode: _choice(found[mode]) if found[mode] is not None else None for mode in ("greedy", "sampling")}
    return Profile(**found | choices | {"pair": Pair(**found["pair"]), "costs": costs_of(found["costs"])})


def _choice(found: dict[str, Any]) -> Choice:
    numbers = {name: float(found[name]) for name in ("measured_speedup", "temperature", "top_p")}
    tuned = {name: _settings(name, each) for name, each in found["tuned"].items() if is_method(name)}
    found = {name: value for name, value in found.items() if name != "predicted_speedup"}  # of earlier versions
    return Choice(**found | numbers | {"settings": _settings(found["method"], found["settings"]), "tuned": tuned})


def _settings(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return a method's settings without those of earlier versions. Raises ValueError for bad ones."""
    known = {key: value for key, value in found.items() if key in settings_of(method_class(name))}
    method(name, **known)
    return known
