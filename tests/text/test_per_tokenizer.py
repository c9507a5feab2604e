"""What is known of a tokenizer, as long as it exists."""

import copy
import gc

from transformers import PreTrainedTokenizerBase

from forerun.text.per_tokenizer import per_tokenizer
from tests.support.toys import tiny_tokenizer


def test_tokenizers_that_alternate_are_looked_at_once_and_not_kept() -> None:
    calls = []

    def size(tokenizer: PreTrainedTokenizerBase) -> int:
        calls.append(len(tokenizer))
        return len(tokenizer)

    known = per_tokenizer(size)
    first, second = (copy.deepcopy(tiny_tokenizer()) for _ in range(2))
    second.add_tokens(["<|more|>"])
    sizes = [known(tokenizer) for tokenizer in (first, second) * 3]
    assert sizes == [len(first), len(second)] * 3 and len(calls) == 2
    del first, second
    gc.collect()
    third = copy.deepcopy(tiny_tokenizer())  # perhaps where one of them was
    third.add_tokens(["a b", "b a"])
    assert known(third) == len(third) and len(calls) == 3
