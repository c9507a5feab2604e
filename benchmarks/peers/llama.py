"""llama.cpp as a peer, on the files that our models were read from.

It runs in Node.js, because `npm install node-llama-cpp` in the repository's root brings a build for
each kind of processor and takes the best; Python's wheels are for AVX2, so a comparison with them
would be unfair. It decodes plainly, with a draft model, or with a lookup in the text.

- It gets the same token ids, and as many threads as torch has. Greedy is the plain argmax; with a
  temperature all of its own filters but top-p are off.
- Each call starts with an empty cache, as every method does in a bench, and its prefill counts.
- It decodes one prompt at a time, on the CPU. Its server would decode several.
- It rounds activations to 8 bits and its cache to 16, so some outputs differ from ours. Its lookup
  may differ from its own plain decoding too.
- Its threads wait for each other by spinning. With more busy threads than cores it fell to a tenth
  of its speed, so leave the machine alone.
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
from forerun.zoo import ModelSource

SCRIPT = Path(__file__).with_suffix(".mjs")
PACKAGE = SCRIPT.parents[2] / "node_modules/node-llama-cpp/package.json"
STEP = 256  # the size of its context is a multiple of this
SPARE = 32  # positions of a context beyond the longest prompt and its output
SEEDS = 2**32 - 1  # its seeds are below this


class LlamaCpp:
    """A process in which llama.cpp decodes one prompt at a time, each in a new context.

    Args:
        models: the files "target" and "draft", the "length" of the context and "threads".
        params: how tokens are chosen, and how many.
        ends: the tokens that end an output.

    Raises:
        ValueError: llama.cpp cannot be started.
    """

    def __init__(self, models: dict[str, Any], params: SamplingParams, ends: set[int]) -> None:
        self.params = params
        self.ends = ends
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

    def close(self) -> None:
        """End the process, which frees its models."""
        self.process.kill()
        self.process.wait()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            raise ValueError(
                "llama.cpp ended: `npm install node-llama-cpp` in the repository's root gets it"
            ) from None
        if "error" in answer:
            raise ValueError(f"llama.cpp cannot decode: {answer['error']}")
        return answer

    def turn(self, name: str, tokens: Sequence[int], most: int) -> dict[str, Any]:
        """Decode `most` tokens after a conversation, of which it reads only what is new to it.

        Returns:
            "tokens", "seconds", the seconds until the "first" token, and "forwards".
        """
        return self._ask(
            {
                "mode": llama_mode(name),
                "tokens": list(tokens),
                "keep": True,
                "most": most,
                "ends": [],
                "sampling": {"temperature": 0, "topP": 1, "seed": 0},
            }
        )

    def run(self, name: str) -> Run:
        """Return the method of that name.

        The seconds of a call are those of reading the prompts and of decoding.
        """
        mode = llama_mode(name)

        def run(
            prompts: Sequence[Sequence[int]],
            seeds: Sequence[int],
            warm_up: int | None = None,
            known: Sequence[int] = (),
        ) -> Outcome:
            most = warm_up or self.params.max_new_tokens
            beginnings = known or [0] * len(prompts)
            answers = [
                self._ask(self._request(mode, prompt, beginning, most, seed))
                for prompt, beginning, seed in zip(prompts, beginnings, seeds, strict=True)
            ]
            return _outcome(answers)

        return run

    def _request(
        self, mode: dict[str, Any], prompt: Sequence[int], known: int, most: int, seed: int
    ) -> dict[str, Any]:
        sampling = {
            "temperature": self.params.temperature,
            "topP": self.params.top_p,
            "seed": seed % SEEDS,
        }
        return {
            "mode": mode,
            "tokens": list(prompt),
            "known": known,
            "most": most,
            "ends": sorted(self.ends),
            "sampling": sampling,
        }


def _outcome(answers: list[dict[str, Any]]) -> Outcome:
    """Return the outcome of a batch.

    The prompt's forward gives a token and is counted, as with transformers.
    """
    return Outcome(
        tokens=[answer["tokens"] for answer in answers],
        seconds=sum(answer["seconds"] for answer in answers),
        target_forwards=sum(answer["forwards"] for answer in answers),
        draft_forwards=0,
        decoding=sum(
            answer["seconds"] - answer.get("first", answer["seconds"]) for answer in answers
        ),
    )


def llama_version() -> str:
    """Return the version of the installed node-llama-cpp."""
    return str(json.loads(PACKAGE.read_text())["version"])


def context_length(positions: int) -> int:
    """Return the size of a context for so many positions."""
    return -(-positions // STEP) * STEP


def load_llama(loaded: Loaded) -> LlamaCpp:
    """Start llama.cpp for all methods of its kind, with as many threads as torch has.

    Raises:
        ValueError: our target is not on the CPU, or llama.cpp cannot be started.
    """
    plan = loaded.plan
    device = loaded.target.device
    names = [name for name in plan.methods if is_llama(name)]
    if device.type != "cpu":
        raise ValueError(
            f"method {names[0]!r} runs on the CPU and the target on {device}: give --device cpu"
        )
    files = {"target": ModelSource.parse(plan.target, "target").gguf}
    if any("draft" in llama_mode(name) for name in names):
        assert plan.draft is not None  # the plan was checked
        files["draft"] = ModelSource.parse(plan.draft, "draft").gguf
    assert None not in files.values()
    longest = max(
        len(prompt.tokens or ()) for prompts in loaded.datasets.values() for prompt in prompts
    )
    models: dict[str, Any] = {part: str(file) for part, file in files.items()}
    models["length"] = context_length(longest + plan.max_new_tokens + SPARE)
    models["threads"] = torch.get_num_threads()
    return LlamaCpp(models, plan.params(), end_tokens(loaded.target.model, plan.params()))
