"""Build the C library beside the package.

It has no Python ABI, so that one wheel per platform serves every Python. FORERUN_PLATFORM names
another platform to build for with Zig's compiler (`PLATFORMS` of forerun/csrc/build.py).
"""

import os
import runpy
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

CSRC = Path("forerun/csrc")
build = runpy.run_path(str(CSRC / "build.py"))
PLATFORM = os.environ.get("FORERUN_PLATFORM")
LIBRARY = (
    build["library_name"](build["PLATFORMS"][PLATFORM].system) if PLATFORM else build["LIBRARY"]
)


class Library(build_ext):
    """Compile each file with its own flags; a machine that cannot goes on without."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the library's path, which has no tag of a Python."""
        return str(Path(*fullname.split(".")[:-1], LIBRARY))

    def build_extension(self, ext: Extension) -> None:
        """Compile the library, or go on without it."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        if PLATFORM:
            build["build_for"](PLATFORM, target)
            return
        try:
            build["build"](target)
        except (OSError, RuntimeError) as error:
            raise CompileError(
                f"no fast kernels, torch's serve, several times slower: {error}"
            ) from error

    def copy_file(self, infile: str, outfile: str, *given: Any, **named: Any) -> tuple[str, bool]:
        """Copy the library beside its sources, for an editable install.

        Processes may run the old one, so the copy has another name until it is complete.
        """
        temporary = f"{outfile}.{os.getpid()}.tmp"
        super().copy_file(infile, temporary, *given, **named)
        build["install"](Path(temporary), Path(outfile))
        return outfile, True


class AnyPython(bdist_wheel):
    """A wheel for every Python of a platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform."""
        return "py3", "none", PLATFORM or super().get_tag()[2]


sources = sorted(str(path) for path in CSRC.iterdir() if path.suffix in (".c", ".h", ".py"))
setup(
    ext_modules=[Extension("forerun.csrc._forerun", sources, optional=not PLATFORM)],
    cmdclass={"build_ext": Library, "bdist_wheel": AnyPython},
)
