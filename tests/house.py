"""The size of the house: `python -m tests.house` prints it and fails where it has grown. Lower a limit when you can."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Lines of Python. Tests are those of benchmarks/ too.
LIMITS = {"forerun": 21_000, "tests": 18_090}
LONGEST = 400  # lines of the longest file of the package


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def main() -> int:
    files = {
        "forerun": sorted((ROOT / "forerun").rglob("*.py")),
        "tests": [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks/tests").rglob("*.py"), ROOT / "conftest.py"],
    }
    failed = False
    for name, limit in LIMITS.items():
        total = sum(map(lines, files[name]))
        failed |= total > limit
        print(f"{name}: {total} lines of Python in {len(files[name])} files, at most {limit}")
    longest = max(files["forerun"], key=lines)
    failed |= lines(longest) > LONGEST
    print(f"longest: {longest.relative_to(ROOT)} with {lines(longest)} lines, at most {LONGEST}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
