"""Fetches the libraries of the server's page anew: the versions below, as npm packs them.

    python -m benchmarks.pages.page_libraries

Each file is copied as it is, beside the package's licence. It needs npm and a registry.
"""

from __future__ import annotations

import argparse
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("forerun/server/static/vendor")


@dataclass(frozen=True)
class Library:
    """A package of npm, and which of its files the page takes."""

    package: str
    version: str
    file: str
    licence: str  # the name of the licence's copy in FOLDER


LIBRARIES = (
    Library("marked", "18.2.1", "lib/marked.esm.js", "marked.LICENSE"),
    Library("dompurify", "3.5.0", "dist/purify.es.mjs", "dompurify.LICENSE"),
    Library("@highlightjs/cdn-assets", "11.12.0", "es/highlight.min.js", "highlight.LICENSE"),
)


def fetch(library: Library, folder: Path) -> None:
    """Copy a library's file and its licence to the folder."""
    with tempfile.TemporaryDirectory() as packed:
        name = f"{library.package}@{library.version}"
        subprocess.run(["npm", "pack", "--silent", name], cwd=packed, check=True)
        (archive,) = Path(packed).glob("*.tgz")
        with tarfile.open(archive) as files:
            for source, target in (
                (library.file, Path(library.file).name),
                ("LICENSE", library.licence),
            ):
                member = files.extractfile(f"package/{source}")
                assert member is not None, f"{name} has no {source}"
                (folder / target).write_bytes(member.read())


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for library in LIBRARIES:
        fetch(library, FOLDER)
        print(f"{library.package} {library.version}")


if __name__ == "__main__":
    main()
