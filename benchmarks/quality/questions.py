"""Chat questions for the scripts that measure kinds of weights, and how these scripts run."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

QUESTIONS = Path(__file__).with_name("questions.jsonl")


def questions(count: int) -> list[str]:
    """Return the first questions of the file. Raises ValueError for more than it has, or none."""
    texts = [json.loads(line)["prompt"] for line in QUESTIONS.read_text().splitlines()]
    if not 1 <= count <= len(texts):
        raise ValueError(f"--prompts must be between 1 and {len(texts)}, not {count}")
    return texts[:count]


def asked(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Return the tokens of a user's question, up to where the answer begins.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        raise ValueError("the file has no chat template, which these prompts need")
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def measured(
    parser: ArgumentParser, args: Namespace, measure: Callable[[Namespace], dict[str, Any]]
) -> dict[str, Any]:
    """Measure with `args.threads` threads; return the results, and write them to `args.out`.

    Nothing is written without `args.out`. A ValueError of `measure` ends the script with one line.
    """
    torch.set_num_threads(args.threads)
    try:
        results = measure(args)
    except ValueError as error:
        parser.error(str(error))
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    return results
