"""Build the sdist, and from it a wheel for each platform. The same sources give the same bytes.

    python -m deploy.wheels FOLDER [PLATFORM ...]

It needs setuptools and ziglang (deploy/wheels.txt), and no other compiler. The platforms are those
of forerun/csrc/build.py; without names, all of them.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from forerun.csrc.build import EPOCH, PLATFORMS

ROOT = Path(__file__).resolve().parents[1]
CALL = "import setuptools.build_meta as b; print(b.build_{kind}({folder!r}))"


def built(kind: str, source: Path, folder: Path, **environment: str) -> Path:
    """Return the `wheel` or `sdist` that setuptools makes of a source tree in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", CALL.format(kind=kind, folder=str(folder))],
        cwd=source,
        env=os.environ | {"SOURCE_DATE_EPOCH": str(EPOCH)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stdout)
    return folder / done.stdout.split()[-1]


def copied_sources(work: Path) -> Path:
    """Return a copy of what git knows, because a build must not take what else lies here."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split("\0")
    copy = work / "sources"
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    return copy


def without_times(sdist: Path) -> None:
    """Write an sdist anew, with one time, owner and mode for all files, in the order of names."""
    packed = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=packed, mode="w") as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            entry = tarfile.TarInfo(member.name)
            entry.type = member.type
            entry.size = member.size
            entry.mode = 0o755 if member.isdir() else 0o644
            entry.mtime = EPOCH
            new.addfile(entry, old.extractfile(member) if member.isfile() else None)
    sdist.write_bytes(gzip.compress(packed.getvalue(), mtime=EPOCH))


def make_wheel(tag: str, sdist: Path, folder: Path) -> Path:
    """Return the wheel of a platform, built from the sdist."""
    with tempfile.TemporaryDirectory() as work, tarfile.open(sdist) as archive:
        # The call's argument is newer than Debian's Python, 3.11.2.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(work)
        (source,) = Path(work).iterdir()
        return built("wheel", source, folder, FORERUN_PLATFORM=tag)


def main(folder: Path, tags: list[str]) -> None:
    """Build the sdist, and the wheels of these tags."""
    unknown = set(tags) - set(PLATFORMS)
    if unknown:
        raise SystemExit(f"{unknown.pop()!r} is no platform: {', '.join(PLATFORMS)}")
    os.umask(0o022)  # modes of files are in the bytes
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        sdist = built("sdist", copied_sources(Path(work)), folder)
    without_times(sdist)
    print(sdist.name, flush=True)
    for tag in tags or PLATFORMS:
        print(make_wheel(tag, sdist, folder).name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
