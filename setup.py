"""Build the C library with the package. Everything else is in pyproject.toml."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

BUILD = runpy.run_path(str(Path(__file__).with_name("forerun") / "csrc" / "build.py"), run_name="build")


class BuildWithLibrary(build_py):
    """Compile the library beside its sources; go on without it if that fails."""

    def run(self) -> None:
        try:
            BUILD["build"](BUILD["HERE"] / BUILD["LIBRARY"])
        except (OSError, RuntimeError) as error:
            print(f"forerun's kernels were not built, so weights in few bits run slowly: {error}", file=sys.stderr)
        super().run()


class Platform(Distribution):
    """A wheel of one platform, for any Python."""

    def has_ext_modules(self) -> bool:
        return True


class AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(distclass=Platform, cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": AnyPython})
