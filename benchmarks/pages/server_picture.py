"""Draws docs/images/page.png: the page of a running server with an answer in it, as Chromium shows it.

    forerun serve --target smollm2 --no-guard &      # drafts also on a machine that has much else to do
    python benchmarks/pages/server_picture.py --url http://127.0.0.1:8000/

Needs the package playwright and Debian's chromium.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

WAIT = 300_000  # milliseconds
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:8000/")
parser.add_argument(
    "--questions",
    nargs="+",
    default=["Write a Python class for a stack.", "Add a method size to it."],
)
parser.add_argument(
    "--both", action="store_true", help="the last one side by side: on a machine without other work"
)
parser.add_argument("--max-tokens", type=int, default=160)
parser.add_argument("--out", type=Path, default=Path("docs/images/page.png"))
args = parser.parse_args()

with sync_playwright() as playwright:
    browser = playwright.chromium.launch(
        executable_path=shutil.which("chromium"), args=["--no-sandbox"]
    )
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    page.set_default_timeout(WAIT)
    page.goto(args.url)
    page.wait_for_selector("#send:enabled")
    page.click("summary")
    page.fill("#max_tokens", str(args.max_tokens))
    page.click("summary")
    for number, question in enumerate(args.questions):
        page.set_checked("#both", args.both and number == len(args.questions) - 1)
        page.fill("#question", question)
        page.press("#question", "Enter")
        page.wait_for_selector("#stop:enabled")
        page.wait_for_selector("#send:enabled")
    # The step that kept most, among those that rejected something.
    columns = page.locator("#steps li")
    marks = columns.evaluate_all(
        "all => all.map(li => [li.querySelector('.rejected') ? 1 : 0, li.children.length])"
    )
    page.locator("#steps").press("Home")
    for _ in range(marks.index(max(marks, default=[0, 0]))):
        page.locator("#steps").press("ArrowRight")
    page.evaluate("document.querySelector('aside').scrollTop = 0")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=args.out)
    browser.close()
Image.open(args.out).convert("P", palette=Image.Palette.ADAPTIVE, colors=128).save(
    args.out, optimize=True
)
print(f"{args.out}: {args.out.stat().st_size / 1000:.0f} kB")
