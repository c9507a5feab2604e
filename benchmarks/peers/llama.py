"""llama.cpp as a method among the others, on the files that our models were read from.

It runs in Node.js: `npm install node-llama-cpp` in the repository's root brings a build for each kind of processor, so
that none is compared in a slower one (Python's wheels are for AVX2). Also with its own drafts: a draft model, or a
lookup in the text.
"""

from __future__ import annotations

import atexit
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.hf import end_tokens
from benchmarks.peers.runners import is_llama, llama_mode
from forerun.bench.measure import Loaded, Outcome, Run
from forerun.sampling.params import SamplingParams
from forerun.zoo import locate
from forerun.zoo.gguf_file import find

SCRIPT = Path(__file__).with_suffix(".mjs")
PACKAGE = SCRIPT.parents[2] / "node_modules/node-llama-cpp/package.json"
STEP = 256  # what its context's size is a multiple of


class LlamaCpp:
    """A process in which llama.cpp decodes one prompt at a time, with a new context for each."""

    def __init__(self, models: dict[str, Any], params: SamplingParams, ends: set[int]) -> None:
        """`models`: files "target" and "draft", "length" of the context and "threads". Raises ValueError if llama.cpp
        cannot be started."""
        self.params, self.ends = params, ends
        node = shutil.which("node")
        if node is None:
            raise ValueError("llama.cpp runs in Node.js here, and there is no node")
        self.process = subprocess.Popen(
            [node, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=SCRIPT.parent,
        )
        atexit.register(self.process.kill)
        self.processor = str(self._ask(models)["processor"])

    def _ask(self, line: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(line) + "\n")
            self.process.stdin.flush()
            found: dict[str, Any] = json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            raise ValueError(
                "llama.cpp ended: `npm install node-llama-cpp` in the repository's root gets it"
            ) from None
        if "error" in found:
            raise ValueError(f"llama.cpp cannot decode: {found['error']}")
        return found

    def turn(self, name: str, tokens: Sequence[int], most: int) -> dict[str, Any]:
        """Decode `most` tokens after a prompt of a conversation, of which it reads only what it does not know yet from
        the turns before. Return "tokens", "seconds", those until the "first" token, and "forwards"."""
        asked = {
            "mode": llama_mode(name),
            "tokens": list(tokens),
            "keep": True,
            "most": most,
            "ends": [],
        }
        return self._ask(asked | {"sampling": {"temperature": 0, "topP": 1, "seed": 0}})

    def run(self, name: str) -> Run:
        """Return the method of that name. A call's seconds are those of reading the prompts and decoding."""
        mode = llama_mode(name)

        def run(
            prompts: Sequence[Sequence[int]],
            seeds: Sequence[int],
            warm_up: int | None = None,
            known: Sequence[int] = (),
        ) -> Outcome:
            most = warm_up or self.params.max_new_tokens
            found = [
                self._ask(
                    {
                        "mode": mode,
                        "tokens": list(prompt),
                        "known": beginning,
                        "most": most,
                        "ends": sorted(self.ends),
                        "sampling": {
                            "temperature": self.params.temperature,
                            "topP": self.params.top_p,
                            "seed": seed % (2**32 - 1),
                        },
                    }
                )
                for prompt, seed, beginning in zip(
                    prompts, seeds, known or [0] * len(prompts), strict=True
                )
            ]
            # The prompt's forward gives a token and is counted, as with transformers.
            return Outcome(
                [each["tokens"] for each in found],
                sum(each["seconds"] for each in found),
                sum(each["forwards"] for each in found),
                0,
                decoding=sum(
                    each["seconds"] - each.get("first", each["seconds"]) for each in found
                ),
            )

        return run


def load_llama(loaded: Loaded) -> LlamaCpp:
    """Start llama.cpp for all methods of its kind, with as many threads as torch has.

    Raises ValueError if our target is not on the CPU, or if llama.cpp cannot be started.
    """
    plan, target = loaded.plan, loaded.target
    names = [name for name in plan.methods if is_llama(name)]
    if target.device.type != "cpu":
        raise ValueError(
            f"method {names[0]!r} runs on the CPU and the target on {target.device}: give --device cpu"
        )
    files = {"target": find(locate(plan.target, "target"))}
    if any("draft" in llama_mode(name) for name in names):
        assert plan.draft is not None  # the plan was checked
        files["draft"] = find(locate(plan.draft, "draft"))
    assert None not in files.values()
    longest = max(
        len(prompt.tokens or ()) for prompts in loaded.datasets.values() for prompt in prompts
    )
    length = -(-(longest + plan.max_new_tokens + 32) // STEP) * STEP
    models = {part: str(file) for part, file in files.items()}
    return LlamaCpp(
        models | {"length": length, "threads": torch.get_num_threads()},
        plan.params(),
        end_tokens(target.model, plan.params()),
    )
