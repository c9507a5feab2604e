"""Thoughts are separated from answers, however their text is cut."""

import random

import pytest

from forerun.sampling.thoughts import Thoughts
from forerun.text.thinking import ThoughtStream

THOUGHTS = Thoughts("<think>", "</think>", False, None, None, {})
OPEN = Thoughts("<think>", "</think>", True, None, None, {})


@pytest.mark.parametrize(
    ("thoughts", "text", "wanted"),
    [
        (THOUGHTS, "<think>\nhm\n\nso\n</think>\n\nYes. ", ("hm\n\nso", "Yes. ")),
        (THOUGHTS, "\n <think></think>Yes", ("", "Yes")),
        (THOUGHTS, "<think>\n\n</think>\n\n", ("", "")),
        (THOUGHTS, "<think>hm", ("hm", "")),
        (THOUGHTS, "<think>hm </thi", ("hm </thi", "")),
        (THOUGHTS, "<thin", ("", "<thin")),
        (THOUGHTS, "  Yes <think>no</think>", ("", "  Yes <think>no</think>")),
        (THOUGHTS, "<b><think>", ("", "<b><think>")),
        (THOUGHTS, "", ("", "")),
        (THOUGHTS, "\n\n", ("", "\n\n")),
        (OPEN, "\nhm </b>\n</think> Yes</think>", ("hm </b>", "Yes</think>")),
        (OPEN, "hm \n", ("hm", "")),
        (OPEN, "</think>Yes", ("", "Yes")),
        (OPEN, "<think>hm</think>", ("<think>hm", "")),
    ],
)
def test_any_cut_gives_the_same(thoughts: Thoughts, text: str, wanted: tuple[str, str]) -> None:
    chance = random.Random(1)
    for cuts in range(12):
        places = sorted(chance.choices(range(len(text) + 1), k=cuts))
        if cuts == 11:
            places = list(range(len(text)))
        stream = ThoughtStream(thoughts)
        parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
        pushed = [stream.push(part, False) for part in parts] + [stream.push("", True)]
        assert ("".join(a for a, _ in pushed), "".join(b for _, b in pushed)) == wanted, parts


def test_only_tokens_up_to_the_close_belong_to_thoughts() -> None:
    thoughts = Thoughts("<think>", "</think>", True, 7, 8, {})
    assert thoughts.count([1, 2]) == 2 and thoughts.count([1, 8, 3]) == 2
