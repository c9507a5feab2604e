"""Check that each wheel of a folder holds the library of its platform, and runs where its tag says.

    python -m deploy.check_wheels FOLDER

A library may need nothing but what every system of its tag has: of Linux, symbols of the C library
up to the version of the tag, which auditwheel checks too; of macOS, old functions of the system's
library, and a version up to the tag's; of Windows, what Windows 10 brings. It needs lief and
auditwheel (deploy/wheels.txt).
"""

from __future__ import annotations

import re
import subprocess
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
MACOS_LIBRARY = "/usr/lib/libSystem.B.dylib"
MACOS_NAME = "@rpath/_forerun.so"  # its own
# What the library may call there. macOS has had all of them since 10.12. The linker's own list is
# that of the newest macOS, so that a newer function would be missed on an older one alone.
MACOS_FUNCTIONS = set(
    re.findall(
        r"\w+",
        """
    bzero clock_gettime free malloc memcpy memmove memset posix_memalign pthread_atfork
    pthread_cond_broadcast pthread_cond_init pthread_cond_wait pthread_create pthread_join
    pthread_mutex_init pthread_mutex_lock pthread_mutex_unlock pthread_sigmask qsort strcmp sysconf
    sysctlbyname dyld_stub_binder __bzero __memcpy_chk __memset_chk
    """,
    )
)
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
    libraries = [each.name for each in library.libraries]
    called = {symbol.name.removeprefix("_") for symbol in library.imported_symbols}
    oldest = tuple(library.build_version.minos[:2])
    check(libraries == [MACOS_NAME, MACOS_LIBRARY], f"{tag}: it is and needs {libraries}")
    check(not list(library.rpaths), f"{tag}: it names folders to search")
    check(called <= MACOS_FUNCTIONS, f"{tag}: it calls {sorted(called - MACOS_FUNCTIONS)}")
    check(oldest == numbers(tag)[:2], f"{tag}: it needs macOS {oldest}")
    is_signed = library.has_code_signature
    check(is_signed or not tag.endswith("arm64"), f"{tag}: ARM loads signed libraries only")
    return str(library.header.cpu_type)


def audit(path: Path, tag: str) -> None:
    """Check that auditwheel gives a wheel the tag that it has.

    Not for musl, whose library auditwheel knows by Alpine's name alone.
    """
    if not tag.startswith("manylinux"):
        return
    command = [sys.executable, "-m", "auditwheel", "show", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    said = " ".join(done.stdout.split())
    check(f'the following platform tag: "{tag}"' in said, f"{tag}: {said}{done.stderr}")


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
    audit(path, tag)


if __name__ == "__main__":
    lief.logging.disable()  # it warns of tables of macOS that are empty
    wheels = sorted(Path(sys.argv[1]).glob("*.whl"))
    check(wheels, "there are no wheels")
    for wheel in wheels:
        check_wheel(wheel)
    print(f"{len(wheels)} wheels hold what their tags say")
