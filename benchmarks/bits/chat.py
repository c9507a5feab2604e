"""Chat prompts for the scripts of this folder."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

QUESTIONS = Path(__file__).with_name("prompts.jsonl")


def questions(count: int) -> list[str]:
    """The first questions of the file. Raises ValueError for more than it has, or none."""
    found = [json.loads(line)["prompt"] for line in QUESTIONS.read_text().splitlines()]
    if not 1 <= count <= len(found):
        raise ValueError(f"--prompts must be between 1 and {len(found)}, not {count}")
    return found[:count]


def asked(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """The tokens of a user's question, up to where the answer begins. Raises ValueError for a tokenizer without a chat
    template."""
    if tokenizer.chat_template is None:
        raise ValueError("the file has no chat template, which these prompts need")
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
