"""Chat prompts for the scripts of this folder, and how they run."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
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


def measured(
    parser: ArgumentParser, given: Namespace, measure: Callable[[Namespace], dict[str, Any]]
) -> None:
    """Measures with `given.threads` threads and writes the result to `given.out`, if that is there. What cannot be
    measured ends the script with one line."""
    torch.set_num_threads(given.threads)
    try:
        found = measure(given)
    except ValueError as error:
        parser.error(str(error))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
