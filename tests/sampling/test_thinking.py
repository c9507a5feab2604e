"""A format begins after the thoughts, and thoughts have a budget: lossless, whatever is drafted."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedTokenizerFast

from forerun.engine.sequence import Request
from forerun.methods import AR, SD, Parts, Suffix
from forerun.sampling.response_format import form_of
from forerun.sampling.sampler import Sampler, ThinkingBudget
from forerun.sampling.thoughts import Thoughts
from tests.support import toys
from tests.support.toys import TableLM, decode, tokens_of

pytest.importorskip("llguidance")
from forerun.sampling.grammar import compiled

END, A, B, C, BEGIN, CLOSE = range(6)
LETTERS = {A: "a", B: "b", C: "c"}
LANGUAGE = ("ab", "c")
JOINT = 5
PROMPT = [A, B, C, B, A, B]
TARGET = toys.random_table(6, 1, 1.3)
DRAFT = toys.random_table(6, 2, 1.3)
CLOSED = Thoughts("<t>", "</t>", False, BEGIN, CLOSE, {}, budget=2)
CASES = {
    "begun by the output": CLOSED,
    "begun by the prompt": replace(CLOSED, is_open=True),
    "no budget": replace(CLOSED, budget=None),
    "a budget of nothing": replace(CLOSED, is_open=True, budget=0),
}
DRAFTERS = {"ar": AR(), "sd": SD(3), "suffix": Suffix()}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {"<end>": END} | {text: token for token, text in LETTERS.items()}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    backend.add_tokens([AddedToken("<t>", normalized=False), AddedToken("</t>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def follows(thoughts: Thoughts, output: list[int]) -> list[int]:
    """The tokens that may follow an output, from what thoughts and the language are."""
    begins = not thoughts.is_open
    if thoughts.is_open or output[:1] == [BEGIN]:
        if CLOSE not in output:
            spent = len(output) - begins
            is_over = thoughts.budget is not None and spent >= thoughts.budget
            return [CLOSE] if is_over else [A, B, C, BEGIN, CLOSE]
        output = output[output.index(CLOSE) + 1 :]
        begins = False
    text = "".join(LETTERS[token] for token in output)
    allowed = [
        token
        for token, letter in LETTERS.items()
        if any(word.startswith(text + letter) for word in LANGUAGE)
    ]
    allowed += [BEGIN] * (begins and not output)
    return allowed + [END] * (text in LANGUAGE)


def expected(thoughts: Thoughts) -> Tensor:
    """[6] * JOINT: the exact distribution of the first tokens, filled up with end tokens."""

    def joint(output: list[int], left: int) -> Tensor:
        if not left:
            return torch.ones(())
        table = torch.zeros([6] * left)
        if output[-1:] == [END]:
            table[(END,) * left] = 1.0
            return table
        allowed = follows(thoughts, output)
        before = [*PROMPT, *output]
        probabilities = TARGET[before[-2], before[-1]][allowed].softmax(-1)
        for token, p in zip(allowed, probabilities, strict=True):
            table[token] = p * joint([*output, token], left - 1)
        return table

    return joint([], JOINT)


def sampler_and_stop(thoughts: Thoughts) -> tuple[Sampler, Any]:
    form = form_of({"type": "regex", "regex": "|".join(LANGUAGE)})
    assert form is not None
    grammar = compiled(form, tokenizer(), frozenset([END]), thoughts)(len(PROMPT))
    processors: list[Any] = [grammar]
    if thoughts.budget is not None:
        processors.insert(0, ThinkingBudget(thoughts, len(PROMPT)))
    return Sampler(False, LogitsProcessorList(processors)), grammar.stop(None)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("case", CASES)
def test_output_follows_the_law(case: str, name: str) -> None:
    sampler, stop = sampler_and_stop(CASES[case])
    generator = torch.Generator().manual_seed(0)
    request = Request(PROMPT, 9, sampler, frozenset([END]), stop, generator=generator)
    drafter = DRAFTERS[name].build(Parts(TableLM(TARGET), TableLM(DRAFT)))
    rows = decode(TableLM(TARGET), drafter, [request] * 500)
    assert not any(row[-1].error for row in rows)
    outcomes = [(tokens_of(row) + [END] * JOINT)[:JOINT] for row in rows]
    assert toys.p_value(outcomes, expected(CASES[case])) > 1e-4
    assert len({tuple(outcome) for outcome in outcomes}) > 1


def test_a_mark_of_several_tokens_is_not_known() -> None:
    """Then the text follows the format from its first token on."""
    sampler, _ = sampler_and_stop(replace(CLOSED, close_token=None, is_open=True, budget=None))
    scores = sampler.scores(torch.zeros(1, 6), lambda row: PROMPT)
    assert scores[0].isfinite().nonzero().flatten().tolist() == [A, C]
