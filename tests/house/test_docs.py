"""The pages of docs/ are short, lead somewhere, and are all in the site."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LAB = DOCS / "lab"
SITE = sorted(path for path in DOCS.rglob("*.md") if LAB not in path.parents)
HISTORY = [ROOT / "CHANGELOG.md", *sorted(LAB.rglob("*.md"))]
BESIDE = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
MAX_WORDS = 25_000  # of the site
MAX_README_LINES = 130
MAX_README_WORDS = 900
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:forerun|tests|benchmarks|deploy|examples)/[\w./-]+)`")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def words(path: Path) -> int:
    """Return the words of a page. Figures and the bars of tables are none."""
    text = path.read_text(encoding="utf-8")
    return sum(any(map(str.isalpha, word)) for word in text.split())


def links(path: Path) -> list[str]:
    prose = FENCE.sub("", path.read_text(encoding="utf-8"))
    return [target for target in LINK.findall(prose) if "://" not in target]


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    prose = FENCE.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def broken(path: Path) -> list[str]:
    problems = []
    for link in links(path):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists():
            problems.append(f"{link}: no such file")
        elif anchor and path not in HISTORY and anchor not in anchors(target):
            problems.append(f"{link}: no such heading")
        elif path in SITE and DOCS not in target.parents:
            problems.append(f"{link}: leads out of the site")
        elif path in [*SITE, ROOT / "README.md"] and LAB in target.parents:
            problems.append(f"{link}: leads into the lab")
    return problems


@pytest.mark.parametrize("path", [*SITE, *BESIDE, *HISTORY], ids=shown)
def test_links_lead_somewhere(path: Path) -> None:
    assert broken(path) == []


@pytest.mark.parametrize("path", [*SITE, *BESIDE], ids=shown)
def test_files_that_a_page_names_are_there(path: Path) -> None:
    named = PATH.findall(path.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_site_is_short() -> None:
    counts = {shown(path): words(path) for path in SITE}
    assert sum(counts.values()) <= MAX_WORDS, sorted(counts.items(), key=lambda item: -item[1])


def test_readme_is_read_in_two_minutes() -> None:
    readme = ROOT / "README.md"
    assert words(readme) <= MAX_README_WORDS
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def pages(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    inner = nav if isinstance(nav, list) else list(nav.values())  # type: ignore[attr-defined]
    return [page for part in inner for page in pages(part)]


def test_the_site_has_each_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(pages(nav)) == sorted(str(path.relative_to(DOCS)) for path in SITE)


@pytest.mark.parametrize(
    "path", [path for path in SITE if path.parent.name == "results"], ids=shown
)
def test_a_page_of_results_names_its_command(path: Path) -> None:
    if path.name != "README.md":
        assert "\npython " in path.read_text(encoding="utf-8")
