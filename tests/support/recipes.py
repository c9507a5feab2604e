"""What tests of training share: a small target with text or conversations, and runs of recipes."""

import copy
import json
from pathlib import Path
from typing import Any

from forerun.model.causal_lm import CausalLM
from forerun.train.run import Run
from tests.support.toys import noisy_copy, save_models, tiny, tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TEXT = "def add(a, b): return a + b\nthe cat sat on the mat\n" * 90


def tiny_target(context: int = 256) -> Any:
    return tiny("llama", vocab=len(tiny_tokenizer()), context=context)


def save_pair(folder: Path, context: int = 256) -> tuple[str, str]:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATE
    target = tiny_target(context)
    save_models(folder, tokenizer, target=target, draft=noisy_copy(target, 0.02))
    return str(folder / "target"), str(folder / "draft")


def make_run(target: str, out: Path, chats: Path | None = None, **more: Any) -> Run:
    text = out.parent / "text.txt"
    text.write_text(TEXT)
    given: dict[str, Any] = {
        "data": () if chats else [str(text)],
        "chats": chats,
        "say": lambda line: None,
    }
    return Run(target, out, **(given | more))


def losses(run: Run) -> list[float]:
    return [
        json.loads(line)["loss"] for line in (run.folder / "log.jsonl").read_text().splitlines()
    ]


def judge(context: int = 256) -> CausalLM:
    return CausalLM(tiny_target(context))
