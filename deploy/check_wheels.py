"""Check that each wheel of a folder holds the library of its platform, and runs where its tag says.

    python -m deploy.check_wheels FOLDER

A library may need nothing but what every system of its tag has: of Linux, symbols of the C library
up to the version of the tag; of macOS, the system's library and a version up to the tag's; of
Windows, what Windows 10 brings. It needs lief (deploy/wheels.txt).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from zipfile import ZipFile

import lief

from forerun.csrc.build import PLATFORMS, build_of, library_name, sources_id

ROOT = Path(__file__).resolve().parents[1]
LINUX = {"manylinux": {"libc.so.6", "libm.so.6", "libpthread.so.0"}, "musllinux": {"libc.so"}}
MACHINES = {
    "x86_64": {"ARCH.X86_64", "CPU_TYPE.X86_64", "MACHINE_TYPES.AMD64"},
    "aarch64": {"ARCH.AARCH64", "CPU_TYPE.ARM64", "MACHINE_TYPES.ARM64"},
}
# Functions of the library that Python calls.
LOADER = (ROOT / "forerun/csrc/library.py").read_text(encoding="utf-8")
CALLED = set(re.findall(r'^    "(fr_\w+)": \(', LOADER, re.MULTILINE))


def check(what: object, reason: str) -> None:
    """End with a reason unless something is true."""
    if not what:
        raise SystemExit(reason)


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers in a text: the version of a tag or of a symbol."""
    return tuple(map(int, re.findall(r"\d+", text)))


def check_linux(library: lief.ELF.Binary, tag: str) -> str:
    """Check a library of Linux; return its machine."""
    kind, _, rest = tag.partition("_")
    oldest = numbers(rest)[:2]
    check(set(library.libraries) <= LINUX[kind], f"{tag}: it needs {library.libraries}")
    for symbol in library.imported_symbols:
        version = symbol.symbol_version
        if version is None or not version.has_auxiliary_version:
            continue
        name = str(version.symbol_version_auxiliary.name)
        check(numbers(name)[:2] <= oldest, f"{tag}: it needs {symbol.name} of {name}")
    return str(library.header.machine_type)


def check_macos(library: lief.MachO.Binary, tag: str) -> str:
    """Check a library of macOS; return its machine."""
    libraries = {each.name for each in library.libraries}
    allowed = {"@rpath/_forerun.so", "/usr/lib/libSystem.B.dylib"}
    oldest = tuple(library.build_version.minos[:2])
    check(libraries <= allowed, f"{tag}: it needs {libraries - allowed}")
    check(oldest == numbers(tag)[:2], f"{tag}: it needs macOS {oldest}")
    is_signed = library.has_code_signature
    check(is_signed or not tag.endswith("arm64"), f"{tag}: ARM loads signed libraries only")
    return str(library.header.cpu_type)


def check_windows(library: lief.PE.Binary, tag: str) -> str:
    """Check a library of Windows; return its machine."""
    for each in library.imports:
        is_of_windows = each.name == "KERNEL32.dll" or each.name.startswith("api-ms-win-")
        check(is_of_windows, f"{tag}: it needs {each.name}")
    return str(library.header.machine)


CHECKS = {"linux": check_linux, "darwin": check_macos, "win32": check_windows}


def check_wheel(path: Path) -> None:
    """Check one wheel."""
    tag = path.stem.split("-", 4)[4]
    platform = PLATFORMS[tag]
    name = f"forerun/csrc/{library_name(platform.system)}"
    with ZipFile(path) as wheel:
        names = wheel.namelist()
        libraries = [each for each in names if each.endswith((".so", ".dll", ".dylib", ".pdb"))]
        check(libraries == [name], f"{tag}: it has the libraries {libraries}")
        (facts,) = (each for each in names if each.endswith(".dist-info/WHEEL"))
        check(f"Tag: py3-none-{tag}\n" in wheel.read(facts).decode(), f"{tag}: it has another tag")
        data = wheel.read(name)
    origin = (build_of(data) or "").partition("-")[0]
    check(origin == sources_id(), f"{tag}: it was built from other sources")
    library = lief.parse(list(data))
    machine = CHECKS[platform.system](library, tag)
    check(machine in MACHINES[platform.machine], f"{tag}: it is for {machine}")
    exported = {function.name.removeprefix("_") for function in library.exported_functions}
    check(CALLED and exported >= CALLED, f"{tag}: it lacks {sorted(CALLED - exported)}")


if __name__ == "__main__":
    wheels = sorted(Path(sys.argv[1]).glob("*.whl"))
    check(wheels, "there are no wheels")
    for wheel in wheels:
        check_wheel(wheel)
    print(f"{len(wheels)} wheels hold what their tags say")
