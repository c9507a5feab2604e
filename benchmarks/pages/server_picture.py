"""Draws docs/images/page.png: the page of a running server with answers in it.

Beside it come page-tokens.png, the same answer by its tokens, and with --both page-race.png.

    forerun serve --target smollm2 --no-guard &
    python benchmarks/pages/server_picture.py --url http://127.0.0.1:8000/

Without the guard there are drafts also on a machine that has much else to do. It needs the package
playwright and Debian's chromium.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

WAIT_MS = 300_000
SIZE = {"width": 1280, "height": 800}
COLOURS = 128
QUESTIONS = ["Write a Python class for a stack.", "Add a method size to it."]
# For each step whether it rejected something, and how many tokens it shows.
MARKS = "all => all.map(li => [li.querySelector('.rejected') ? 1 : 0, li.children.length])"


def ask(page: Any, question: str, both: bool) -> None:
    """Ask a question, and wait for the answer."""
    page.set_checked("#both", both)
    page.fill("#question", question)
    page.press("#question", "Enter")
    page.wait_for_selector("#stop:enabled")
    page.wait_for_selector("#send:enabled")


def show_best_step(page: Any) -> None:
    """Select the step that kept most, among those that rejected something."""
    marks = page.locator("#steps li").evaluate_all(MARKS)
    steps = page.locator("#steps")
    steps.press("Home")
    for _ in range(marks.index(max(marks, default=[0, 0]))):
        steps.press("ArrowRight")
    page.evaluate("document.getElementById('about').scrollTop = 0")


def show(page: Any, view: str, selector: str) -> None:
    """Show a view of the answers, from the last element that the selector finds on."""
    page.get_by_role("radio", name=view).check()
    page.locator(selector).last.evaluate("e => e.scrollIntoView({ block: 'start' })")


def draw(page: Any, path: Path) -> None:
    """Write what the window shows to a file, with few colours."""
    page.screenshot(path=path)
    image = Image.open(path).convert("P", palette=Image.Palette.ADAPTIVE, colors=COLOURS)
    image.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/")
    parser.add_argument("--questions", nargs="+", default=QUESTIONS)
    parser.add_argument(
        "--both",
        action="store_true",
        help="draw a race with plain decoding too: on a machine without other work",
    )
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--out", type=Path, default=Path("docs/images/page.png"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)
        page.set_default_timeout(WAIT_MS)
        page.goto(args.url)
        page.wait_for_selector("#send:enabled")
        page.click("#tab-settings")
        page.fill("#max_tokens", str(args.max_tokens))
        page.click("#tab-figures")
        for question in args.questions:
            ask(page, question, both=False)
        show_best_step(page)
        show(page, "Tokens", ".question")
        draw(page, args.out.with_stem(f"{args.out.stem}-tokens"))
        show(page, "Read", ".question")
        draw(page, args.out)
        if args.both:
            page.click("#clear")
            ask(page, args.questions[0], both=True)
            show(page, "Read", ".race")
            draw(page, args.out.with_stem(f"{args.out.stem}-race"))
        browser.close()


if __name__ == "__main__":
    main()
