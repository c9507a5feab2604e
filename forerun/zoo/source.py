"""`ModelSource`: what a user names as a model or trained layer, parsed once and passed on.

Needs neither torch nor numpy, so that the command line refuses a name that stands for nothing at
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forerun.zoo.folders import ROLE_OF_TYPE, check_role
from forerun.zoo.known import EMBEDDED, MODELS, WEIGHTS_FOLDER, companion, own_draft, require
from forerun.zoo.pieces import pieces_of

Kind = Literal["folder", "gguf", "hub", "object", "missing"]
# In a draft's folder. vLLM takes every file of tensors there for weights, so this one is JSON.
HOT_FILE = "hot.json"


@dataclass(frozen=True)
class ModelSource:
    """What a user names as a model or a trained layer.

    Parsing raises nothing: what cannot be loaded is of the kind "missing" and says why when it is
    used. So an unknown method is reported before a model that is not there, and `forerun demo` can
    check its options before it downloads a model.

    Attributes:
        kind: "folder"; "gguf", a GGUF file or a folder that holds one; "hub", an id of the hub;
            "object", a loaded model or layer; "missing", what cannot be loaded.
        role: "target", "draft", "pre-verifier" or "head".
        given: the user's own value, a name, a path or an object.
        path: the folder or file that is named. None for hub ids and objects.
        gguf: the GGUF file, which is `path` or lies in it.
        known: the name, if forerun knows the model by it. Only such a target has companions.
        problem: why it is missing.
    """

    kind: Kind
    role: str
    given: Any
    path: Path | None = None
    gguf: Path | None = None
    known: str | None = None
    problem: str | None = None

    @classmethod
    def parse(cls, given: Any, role: str) -> ModelSource:
        """Parse what a user names. A ModelSource is returned as it is."""
        if isinstance(given, ModelSource):
            return given
        if not isinstance(given, str | Path):
            return cls("object", role, given)
        if role in ROLE_OF_TYPE.values():  # trained layers are not on the hub
            return cls("folder", role, given, Path(given))
        known = given if isinstance(given, str) and (given == EMBEDDED or given in MODELS) else None
        try:
            path = _known_path(known, role) if known is not None else _path(given, role)
            gguf = gguf_in(path) if path is not None else None
        except ValueError as error:
            return cls("missing", role, given, known=known, problem=str(error))
        if path is None:
            return cls("hub", role, given)
        return cls("folder" if gguf is None else "gguf", role, given, path, gguf, known)

    @property
    def name(self) -> str:
        """What errors call it: as the user wrote it."""
        return str(self.given)

    def check(self) -> None:
        """Raise ValueError if it is missing.

        That is a path that does not exist (the hub is not asked), the folder of another role, a
        folder with several GGUF files, or a known model that was not downloaded.
        """
        if self.problem is not None:
            raise ValueError(self.problem)

    @property
    def location(self) -> str | Path:
        """The folder, file or hub id of a model that is not an object, after `check`."""
        self.check()
        return self.path if self.path is not None else str(self.given)

    @property
    def hot_folder(self) -> Path | None:
        """The folder that lists the hot tokens of a draft, if it has a list; None for hub ids.

        For a downloaded draft the list ships with forerun. Raises ValueError as `check` does.
        """
        if self.known is not None:
            shipped = WEIGHTS_FOLDER / self.known
            if self.known in MODELS and (shipped / HOT_FILE).is_file():
                return shipped
        location = self.location
        return location if isinstance(location, Path) else None

    @property
    def file_bytes(self) -> int:
        """The bytes of the files with its weights; 0 for hub ids and objects.

        In memory the weights may take more or less, because they may be stored in another format.
        """
        if self.gguf is not None:
            return sum(piece.stat().st_size for piece in pieces_of(self.gguf))
        if self.path is None:
            return 0
        return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))

    def companion(self, part: str | None) -> Path | None:
        """Return the folder of a draft, head or layer that ships with forerun for this target."""
        return companion(self.known, part)

    def own_draft(self) -> ModelSource | None:
        """Return the draft that ships with this target or was downloaded with it, or None."""
        name = own_draft(self.known)
        return ModelSource.parse(name, "draft") if name is not None else None


def gguf_in(path: Path) -> Path | None:
    """Return the GGUF file that a path stands for, or None for other models.

    It is a path that ends in .gguf, or the only such file in a folder without config.json. Raises
    ValueError for a path that is no file, and for a folder with several GGUF files.
    """
    if _is_gguf(path):
        if not path.is_file():
            raise ValueError(f"there is no file {str(path)!r}")
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(file for file in path.glob("*") if _is_gguf(file) and file.is_file())
    if len(files) > 1 and not set(files) <= set(pieces_of(files[0])):
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{str(path)!r} holds several GGUF files; give one of {names}")
    return files[0] if files else None


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def _known_path(name: str, role: str) -> Path:
    """Return the folder or file of a model that forerun knows by name."""
    if name == EMBEDDED:
        return WEIGHTS_FOLDER / role
    shipped = companion(name, role) if role == "draft" else None
    return shipped if shipped is not None else require(name)


def _path(given: str | Path, role: str) -> Path | None:
    """Return the folder or file that a user names, None if it is an id of the hub."""
    path = Path(given).expanduser()
    check_role(path, role)
    if path.is_dir() or (_is_gguf(path) and path.is_file()):
        return path
    name = str(given)
    is_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists()
    if isinstance(given, Path) or is_local or _is_gguf(path):
        what = "GGUF file" if _is_gguf(path) else "model folder"
        raise ValueError(f"no {what} {name!r} for the {role}")
    return None
