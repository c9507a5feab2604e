"""The proposer for vLLM: what it drafts for rows of tokens, and vLLM's output with it."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from forerun.integrations.vllm import Proposer
from tests.support.toys import noisy_copy, refuses, save_models

CONTEXT = 256
MOST = 6
COUNTING = list(range(10, 22)) * 3


def config(
    model: PreTrainedModel | None = None, tokenizer: str | None = None, **options: Any
) -> SimpleNamespace:
    """What the proposer reads of vLLM's configuration."""
    text = model.config if model is not None else SimpleNamespace(eos_token_id=None)
    size = model.config.vocab_size if model is not None else 300
    fields = {
        "max_model_len": CONTEXT,
        "hf_text_config": text,
        "get_vocab_size": lambda: size,
        "tokenizer": tokenizer,
    }
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=MOST),
        model_config=SimpleNamespace(**fields),
        additional_config={"forerun": options} if options else {},
    )


def ask(proposer: Proposer, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[int]]:
    """Ask as vLLM does, for rows of (tokens before, tokens sampled now).

    The latter are empty while a prompt is read.
    """
    ids = np.full((len(rows), CONTEXT), 299, dtype=np.int32)  # after a row's end there is rubbish
    counts = np.zeros(len(rows), dtype=np.int32)
    for row, (before, new) in enumerate(rows):
        tokens = [*before, *new]
        ids[row, : len(tokens)] = tokens
        counts[row] = len(tokens)
    return proposer.propose([list(new) for _, new in rows], counts, ids, slot_mappings=None)


def test_drafts_are_ragged_and_bounded() -> None:
    proposer = Proposer(config(method="suffix"))
    rows = [(COUNTING, [10, 11]), ([1, 2, 3], [4]), (COUNTING, []), ([5, 6, 7, 5], [6])]
    counted, new, unread, repeated = ask(proposer, rows)
    assert counted == [12, 13, 14, 15, 16, 17][: len(counted)] and len(counted) > 3
    assert new == unread == []
    assert 0 < len(repeated) <= MOST and repeated[0] == 7
    text = (COUNTING * 10)[: CONTEXT - 3]
    assert (
        len(ask(proposer, [(text, [text[-12]])])[0]) == 1
    )  # one more comes from the target itself
    full = (COUNTING * 10)[:CONTEXT]
    assert ask(proposer, [(full[:-1], full[-1:])]) == [[]]


def test_rows_that_move_keep_their_text_and_those_that_end_are_forgotten() -> None:
    proposer = Proposer(config(method="suffix"))
    texts = proposer._texts
    one, two = [1, 2, 3, 4], [7, 8, 9]
    ask(proposer, [(one, [5]), (two, [8])])
    ids = {row: text.seq.id for row, text in texts.rows.items()}
    ask(proposer, [([*two, 8], [9]), ([*one, 5], [1, 2])])
    assert {row: text.seq.id for row, text in texts.rows.items()} == {0: ids[1], 1: ids[0]}
    assert texts.rows[1].seq.output == [5, 1, 2]
    ask(proposer, [([*two, 8, 9], [7])])
    drafter: Any = proposer._drafter
    assert list(drafter.rows) == [ids[1]] and drafter.memory.texts == [(1, 2, 3, 4, 5, 1, 2)]
    # What ended is drafted from in other texts.
    assert ask(proposer, [([*two, 8, 9, 7], [8]), ([30, 31, 3, 4], [5])])[1][:2] == [1, 2]
    # Two rows have one text, and then one of them has a new one.
    ask(proposer, [([1, 2], [1]), ([1, 2], [1])])
    first = {text.seq.id for text in texts.rows.values()}
    assert len(first) == 2
    ask(proposer, [([1, 2, 1], [2]), ([50, 51], [52])])
    assert texts.rows[0].seq.id in first and texts.rows[1].seq.id not in first
    assert texts.rows[1].seq.tokens == [50, 51, 52]


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """A random Llama with heads of a size that vLLM has kernels for."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    sizes |= {"vocab_size": 300, "num_key_value_heads": 1, "max_position_embeddings": 512}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.06)).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a draft that agrees sometimes."""
    target = tiny_llama()
    return save_models(
        tmp_path_factory.mktemp("models"), target=target, draft=noisy_copy(target, 0.006)
    )


METHODS: list[dict[str, Any]] = [{"threshold": 0.1}, {"method": "sd", "gamma": 4}]


@pytest.mark.parametrize(
    "options", METHODS, ids=lambda options: options.get("method", "-".join(options))
)
def test_a_draft_model_says_what_it_would_say_alone(folder: Path, options: dict[str, Any]) -> None:
    """After whatever was accepted and rejected, a draft is the draft model's own continuation."""
    target = tiny_llama()
    draft = str(folder / "draft")
    proposer = Proposer(
        config(target, str(folder / "target"), draft=draft, draft_weights="float32", **options)
    )
    alone = LlamaForCausalLM.from_pretrained(draft).eval()

    def next_of(model: PreTrainedModel, tokens: list[int]) -> int:
        with torch.inference_mode():
            return int(model(torch.tensor([tokens])).logits[0, -1].argmax())

    texts = [[5, 6, 7], [40, 41, 42, 43, 44]]
    news = [[next_of(target, text)] for text in texts]
    lengths = set()
    accepted = 0
    for _ in range(8):
        asked = list(zip(texts, news, strict=True))
        drafts = ask(proposer, asked)
        assert ask(proposer, asked) == drafts  # as for new requests that have the texts of old ones
        for row, drafted in enumerate(drafts):
            texts[row] = texts[row] + news[row]
            lengths.add(len(drafted))
            assert 0 < len(drafted) <= MOST
            text = list(texts[row])
            new = []
            for token in drafted:
                assert token == next_of(alone, text)
                text.append(token)
            for token in [*drafted, None]:  # the target's verdict
                new.append(next_of(target, texts[row] + new))
                if new[-1] != token:
                    break
                accepted += 1
            news[row] = new
    assert accepted > 0
    drafter: Any = proposer._drafter
    ask(proposer, [([*texts[1], *news[1]], [1])])
    assert len(drafter._present) == 1 and len(drafter.model.cache.ids) == 1


def test_mistakes_are_named() -> None:
    for options, named in (
        ({"method": "medusa"}, "'medusa' is not for vLLM"),
        ({"method": "sd"}, "'sd' needs draft=FOLDER"),
        ({"method": "suffix", "draft": "x"}, "'suffix' takes no draft"),
        ({"method": "pacer", "draft": "x"}, "'pacer' is not for vLLM"),
        ({"method": "suffix", "gamma": 3}, "no setting 'gamma'"),
        ({"draft": 3}, "draft must be a name"),
        ({"draft": "x", "draft_weights": "int3"}, "unknown weights 'int3'"),
    ):
        refuses(named, Proposer, config(**options))


# vLLM itself, in a process of its own, as its import takes longest.

PROMPTS = [
    "the cat sat on the mat. the cat sat",
    "def add(a, b): return a + b; def add(a",
    "aa ab ba abab aa ab ba",
    "x",
    "for i in range(10): print(i)",
    "the cat sat on the mat. the cat sat on the dog. " * 5,
]
ENGINE = """
import gc, json, sys
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
folder, prompts, cases = json.loads(sys.argv[1])
for options in cases:
    more = {}
    if options is not None:
        more["speculative_config"] = {
            "method": "custom_class",
            "model": "forerun.integrations.vllm.Proposer",
            "num_speculative_tokens": 6,
        }
        more["additional_config"] = {"forerun": options}
    engine = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=4,
                 max_num_batched_tokens=64, disable_log_stats=False, **more)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    tokens = [list(each.outputs[0].token_ids) for each in engine.generate(prompts, params)]
    metrics = [metric for metric in engine.get_metrics() if "spec_decode" in metric.name]
    counts = {metric.name: metric.value for metric in metrics if hasattr(metric, "value")}
    print("RESULT" + json.dumps([tokens, counts]), flush=True)
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()
"""
METHODS_OF_VLLM = ("suffix", "cumulative")
Answers = dict[str | None, tuple[list[list[int]], dict[str, int]]]


@pytest.fixture(scope="module")
def answered(folder: Path) -> Answers:
    """By method, None for none: the tokens after the prompts, and vLLM's counters of drafts."""
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed here; .ci/vllm makes an environment that has it")
    drafting = {"draft": str(folder / "draft"), "draft_weights": "float32", "threshold": 0.1}
    cases: list[dict[str, Any] | None] = [None, {"method": "suffix"}, drafting]
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    settings |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    settings |= {"PYTHONPATH": str(Path(__file__).parents[2])}
    asked = json.dumps([str(folder / "target"), PROMPTS, cases])
    command, env = [sys.executable, "-c", ENGINE, asked], os.environ | settings
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=290)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert len(lines) == len(cases), done.stdout[-2000:] + done.stderr[-4000:]
    found = [json.loads(line.removeprefix("RESULT")) for line in lines]
    return dict(
        zip((None, *METHODS_OF_VLLM), ((tokens, counts) for tokens, counts in found), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS_OF_VLLM)
def test_vllm_says_the_same_with_the_proposer(answered: Answers, method: str) -> None:
    accepted, drafted = "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens"
    tokens, counts = answered[method]
    assert tokens == answered[None][0] and 0 < counts[accepted] <= counts[drafted]
