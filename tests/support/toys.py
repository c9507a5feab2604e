"""Models that tests can afford.

Tiny random Hugging Face models, and tables of logits whose distributions are known.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from scipy.stats import chisquare
from tokenizers import Tokenizer, decoders, models, normalizers
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.training.tokenizer import train_tokenizer
from forerun.backends.gguf.model import load_gguf
from forerun.drafters.plain import PlainDrafter
from forerun.engine.draft import Draft
from forerun.engine.engine import Drafter, Engine, Step
from forerun.engine.sequence import Request
from forerun.engine.sequence import Sequence as EngineSequence
from forerun.engine.step import Proposal
from forerun.engine.target import ChunkSize, Output, next_size
from forerun.heads.heads import HiddenConfig, HiddenDrafter
from forerun.heads.pre_verifier import PreVerifier, PreVerifierConfig
from forerun.methods import METHODS
from forerun.model.causal_lm import CausalLM, fingerprint
from forerun.sampling.sampler import Sampler
from tests.support.known_costs import COSTS

VOCAB = 64
CONTEXT = 256
WINDOW = 16

# A large initializer range makes outputs varied. With the default, a random model repeats one
# token.
_TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": None}
_WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
_SIZES = (
    _TOKENS
    | _WIDTHS
    | {"num_key_value_heads": 2, "intermediate_size": 64, "initializer_range": 0.2}
)
_GPT_SIZES = _TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
_ONE_HEAD_SIZE = _SIZES | {"head_dim": 8}
_BOTH_KINDS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_UNTIED = {"tie_word_embeddings": False, "initializer_range": 0.4}  # else these repeat one token
_UNGROUPED = {
    name: size for name, size in _SIZES.items() if name != "num_key_value_heads"
} | _UNTIED
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _SIZES),
    "gpt2": ("GPT2LMHeadModel", _GPT_SIZES),
    "qwen3": ("Qwen3ForCausalLM", _ONE_HEAD_SIZE),
    "gemma": ("GemmaForCausalLM", _ONE_HEAD_SIZE),
    "gemma2": ("Gemma2ForCausalLM", _ONE_HEAD_SIZE | _BOTH_KINDS),
    "gemma3": ("Gemma3ForCausalLM", _ONE_HEAD_SIZE | _BOTH_KINDS),
    "mistral": ("MistralForCausalLM", _SIZES | {"sliding_window": WINDOW}),
}
CORE = list(_ARCHITECTURES)  # every method and setting is tested with these, the others with fewer
_ARCHITECTURES |= {
    "qwen2": ("Qwen2ForCausalLM", _SIZES | _QWEN_WINDOW),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _ONE_HEAD_SIZE | _EXPERTS | _UNTIED | {"num_experts": 4}),
    "mixtral": ("MixtralForCausalLM", _SIZES | {"num_local_experts": 4}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        _SIZES
        | _EXPERTS
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "n_routed_experts": 4,
            "n_group": 1,
        }
        | {
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        _ONE_HEAD_SIZE | _BOTH_KINDS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma4": (
        "Gemma4ForCausalLM",  # the second half of the layers uses the entries of the first
        _ONE_HEAD_SIZE
        | {
            "sliding_window": WINDOW,
            "layer_types": _BOTH_KINDS["layer_types"] * 2,
            "num_hidden_layers": 4,
        }
        | {"num_kv_shared_layers": 2, "global_head_dim": 16}
        | {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
    ),
    "phi": ("PhiForCausalLM", _SIZES),
    "phi3": ("Phi3ForCausalLM", _SIZES | {"sliding_window": WINDOW}),
    "olmo2": ("Olmo2ForCausalLM", _SIZES),
    "olmo3": ("Olmo3ForCausalLM", _SIZES | _BOTH_KINDS),
    "granite": ("GraniteForCausalLM", _SIZES),
    "smollm3": ("SmolLM3ForCausalLM", _SIZES | {"no_rope_layers": [1, 0]}),
    "starcoder2": ("Starcoder2ForCausalLM", _SIZES | _UNTIED | {"sliding_window": WINDOW}),
    "stablelm": ("StableLmForCausalLM", _SIZES),
    "cohere": ("CohereForCausalLM", _SIZES | _UNTIED | {"logit_scale": 1.0}),
    "falcon": (
        "FalconForCausalLM",
        _UNGROUPED | {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", _UNGROUPED),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", _GPT_SIZES | _UNTIED),
    "gptj": ("GPTJForCausalLM", _GPT_SIZES | _UNTIED | {"rotary_dim": 4}),
    "opt": (
        "OPTForCausalLM",
        _TOKENS
        | _WIDTHS
        | {"ffn_dim": 64, "word_embed_proj_dim": 16, "init_std": 0.4, "tie_word_embeddings": False},
    ),
}
ARCHITECTURES = list(_ARCHITECTURES)


def tiny(
    architecture: str,
    seed: int = 0,
    *,
    vocab: int = VOCAB,
    context: int = CONTEXT,
    attention: str | None = None,
) -> PreTrainedModel:
    """A random model of that architecture in float32.

    Without `attention` it has the architecture's default.
    """
    name, sizes = _ARCHITECTURES[architecture]
    kind = getattr(transformers, name)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = kind(kind.config_class(vocab_size=vocab, max_position_embeddings=context, **sizes))
    if attention is not None:
        made.set_attn_implementation(attention)
    return made.eval()


def noisy_copy(model: PreTrainedModel, scale: float, seed: int = 0) -> PreTrainedModel:
    """The model with noise on its weights: a draft that agrees sometimes."""
    noisy = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in noisy.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * scale)
    return noisy


BASELINES = {  # methods that serve comparison only, by the name that the command line takes
    name: f"benchmarks.baselines.{name_of_class}"
    for name, name_of_class in {
        "heuristic": "heuristic:Heuristic",
        "svip": "entropy:SVIP",
        "adaedl": "entropy:AdaEDL",
        "lookup": "lookup:Lookup",
        "lookahead": "lookahead:Lookahead",
    }.items()
}
# Small settings, so that short outputs see all parts of a method.
METHOD_SETTINGS: dict[str, dict[str, Any]] = {
    "sd": {"gamma": 3},
    "suffix": {"most": 6, "memory": 50},
    "hybrid": {"threshold": 2.0, "memory": 50},
    "ouroboros": {"gamma": 4, "guesses": 2, "ngram": 3, "suffixes": 2},
    "pacer-ouroboros": {"guesses": 2, "ngram": 3, "suffixes": 1},
    "lyanna": {"depth": 3, "width": 2, "nodes": 5},
    "pacer-lyanna": {"depth": 4, "nodes": 5, "block": 2},
    "eagle": {"depth": 3, "width": 2, "nodes": 5},
    "eagle3": {"depth": 3, "width": 2, "nodes": 5},
}
LAYERED = ("pacer", "pacer-ouroboros")  # methods that need a layer


def random_layer(
    target: PreTrainedModel | None = None,
    draft: PreTrainedModel | None = None,
    seed: int = 0,
    **settings: Any,
) -> PreVerifier:
    """An untrained pre-verifier for these models."""
    sizes: dict[str, Any] = {
        part: fingerprint(each)
        for part, each in (("target", target), ("draft", draft))
        if each is not None
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer = PreVerifier(PreVerifierConfig(**sizes | settings)).eval()
        for traces in layer.buffers():  # [N, G], survival in 255ths
            traces.copy_(255 * torch.rand(traces.shape).pow(0.1).cumprod(-1))
    return layer


def random_head(target: CausalLM, hot: int = 12, **settings: Any) -> HiddenDrafter:
    """An untrained head over hidden states for this model."""
    config = target.config
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        sizes |= {
            "head_dim": 8,
            "rank": 8,
            "max_position_embeddings": 512,
            "hidden_size": config.hidden_size,
        }
        known: dict[str, Any] = {
            "vocab_size": target.vocab_size,
            "hot_size": hot,
            "target": target.fingerprint,
        }
        head = HiddenDrafter(HiddenConfig(**sizes | known | settings)).eval()
        head.hot.copy_(torch.randperm(target.vocab_size)[:hot])
        for name, parameter in head.named_parameters():
            if name.endswith("bias"):  # zeros until they are trained
                torch.nn.init.normal_(parameter)
    return head


def parts_of(
    name: str, target: PreTrainedModel, draft: PreTrainedModel | None, **settings: Any
) -> dict[str, Any]:
    """The untrained layer and head that a method needs in a Decoder. `settings` are the head's."""
    layer = random_layer(target, draft) if name in LAYERED else None
    kind = METHODS[name].head if name in METHODS else None
    head = random_head(CausalLM(target), kind=kind, **settings) if kind else None
    return {"pre_verifier": layer, "head": head, "costs": COSTS}


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that has seen ASCII only, so that other characters are split over tokens."""
    lines = [
        "the cat sat on the mat",
        "def add(a, b): return a + b",
        "aa ab ba abab",
        "for i in range(10): print(i)",
    ]
    return train_tokenizer(lines, vocab_size=300)


def pieces(*, prefix: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer of SentencePiece's kind.

    Spaces are U+2581, characters that it lacks are bytes, and a space comes before a text.
    """
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("\u2581", "the"),
        ("\u2581", "a"),
        ("a", "t"),
        ("c", "at"),
        ("\u2581", "cat"),
    ]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    names += [*"abcdefghijklmnopqrstuvwxyz().,:0123456789", *("".join(pair) for pair in merges)]
    vocabulary = {name: id for id, name in enumerate(names)}
    backend = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), spaces] if prefix else [spaces]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def save_models(
    folder: Path, tokenizer: PreTrainedTokenizerFast | None = None, **models: PreTrainedModel
) -> Path:
    """Save each model in a folder of its name, with a tokenizer (the toys' if none is given)."""
    for name, model in models.items():
        model.save_pretrained(folder / name)
        (tokenizer or tiny_tokenizer()).save_pretrained(folder / name)
    return folder


def save_lines(path: Path, lines: Iterable[Any]) -> Path:
    """Write a .jsonl file. Texts are lines as they are."""
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path


def random_tree(
    size: int, vocab: int, generator: torch.Generator, root: int | None = None
) -> Draft:
    """A tree of at most `size` point masses, siblings all different."""

    def pick(below: int) -> int:
        return int(torch.randint(below, (1,), generator=generator))

    tokens = [pick(vocab) if root is None else root]
    parents = [-1]
    for node in range(1, size):
        parent = pick(node)
        token = pick(vocab)
        if parent < len(tokens) and (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return Draft(tokens, parents)


class RandomTrees(PlainDrafter):
    """Point masses at random, as trees that may be deeper than the sequence's remaining tokens."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.generator = torch.Generator().manual_seed(0)

    def propose(self, seqs: list[EngineSequence]) -> Proposal:
        return Proposal(
            [random_tree(9, self.vocab, self.generator, root=seq.tokens[-1]) for seq in seqs]
        )


class TableLM:
    """Stands in for CausalLM.

    Its logits [V] after tokens (.., a, b) are table[a, b], and table[0, b] if b is the first token.
    """

    context = None
    device = torch.device("cpu")
    dtype = torch.float32
    fused_draft = prompt_hidden = None
    keeps_prefixes = False
    prefilled = 0
    position_bytes = 1
    clock = staticmethod(perf_counter)

    def __init__(self, table: Tensor) -> None:
        self.table = table  # [V, V, V]
        self.rows: dict[int, list[int]] = {}
        self.prompt: list[int] = []
        self._drafts: dict[int, Draft] = {}

    @property
    def vocab_size(self) -> int:
        return len(self.table)

    @property
    def prompt_read(self) -> int:
        return len(self.prompt)

    def fresh(self, prefix_bytes: int = 0) -> TableLM:
        return TableLM(self.table)

    def share_texts(self, other: TableLM) -> None:
        pass

    def __contains__(self, id: int) -> bool:
        return id in self.rows

    def length(self, id: int) -> int:
        return len(self.rows.get(id, ()))

    def prefill(self, tokens: Sequence[int], chunk: ChunkSize, *_: Any, **__: Any) -> Iterator[int]:
        self.prompt = []
        count = 0
        while count < len(tokens):
            size = min(next_size(chunk), len(tokens) - count)
            count += size
            self.prefilled += size
            self.prompt = list(tokens[:count])
            yield size
        self.prompt = list(tokens)  # which another prompt may have replaced between two chunks

    def join(self, id: int, reserve: int = 0) -> None:
        self.rows[id] = list(self.prompt)

    def add(self, id: int, reserve: int = 0) -> None:
        self.rows[id] = []

    def drop(self, id: int) -> None:
        self.rows.pop(id, None)

    def save_prefix(self, *_: Any, **__: Any) -> None:
        pass

    def forget_prompt(self) -> None:
        self.prompt = []

    def reset(self) -> None:
        self.rows.clear()

    def _logits(
        self, ids: Sequence[int], trees: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[Tensor]:
        """Logits [N_r, V] after each node of trees given as (tokens, parents)."""
        before, last = [], []
        for id, (tokens, parents) in zip(ids, trees, strict=True):
            before += [
                tokens[parent] if parent >= 0 else (self.rows[id] or [0])[-1] for parent in parents
            ]
            last += tokens
        return list(self.table[before, last].split([len(tokens) for tokens, _ in trees]))

    def forward(self, ids: Sequence[int], drafts: Sequence[Draft], capture: str = "") -> Output:
        self._drafts = dict(zip(ids, drafts, strict=True))
        return Output(self._logits(ids, [(draft.tokens, draft.parents) for draft in drafts]), None)

    def extend(self, ids: Sequence[int], chains: Sequence[Sequence[int]]) -> list[Tensor]:
        logits = self._logits(ids, [(chain, range(-1, len(chain) - 1)) for chain in chains])
        for id, chain in zip(ids, chains, strict=True):
            self.rows[id] += chain
        return logits

    def commit(self, ids: Sequence[int], paths: Sequence[list[int]]) -> None:
        for id, path in zip(ids, paths, strict=True):
            self.rows[id] += [self._drafts[id].tokens[node] for node in path]

    def crop(self, ids: Sequence[int], lengths: Sequence[int]) -> None:
        for id, length in zip(ids, lengths, strict=True):
            del self.rows[id][length:]


def join_all(
    lm: CausalLM,
    rows: Mapping[int, Sequence[int]],
    chunk: int = 512,
    reserve: int = 0,
    capture: Any = "",
) -> None:
    """Prefills each text and has it join under its id."""
    for id, tokens in rows.items():
        ran = list(lm.prefill(tokens, chunk, capture=capture))
        assert all(0 < count <= chunk for count in ran)
        lm.join(id, reserve)


def extend(
    lm: CausalLM, ids: Sequence[int], chains: Sequence[Sequence[int]], capture: Any = "head"
) -> Output:
    """Runs and commits chains, with captured hidden states."""
    found = lm.forward(ids, [Draft.chain(chain[0], chain[1:]) for chain in chains], capture)
    lm.commit(ids, [range(len(chain)) for chain in chains])
    return found


def random_table(vocab: int, seed: int, scale: float = 1.0) -> Tensor:
    """Logits [V, V, V] for a TableLM."""
    return torch.randn(vocab, vocab, vocab, generator=torch.Generator().manual_seed(seed)) * scale


@torch.no_grad()
def joint_distribution(
    model: Callable[[Tensor], Any],
    prompt: Sequence[int],
    length: int,
    processors: LogitsProcessorList | None,
) -> Tensor:
    """The exact distribution [V] * length of the first tokens after the prompt.

    `model` gives `logits`.
    """
    if not length:
        return torch.ones(())
    ids = torch.tensor([prompt])
    scores = model(ids).logits[:, -1].float()
    first = (processors(ids, scores) if processors else scores)[0].softmax(-1)
    rest = [
        joint_distribution(model, [*prompt, token], length - 1, processors)
        for token in range(len(first))
    ]
    return torch.stack([p * each for p, each in zip(first, rest, strict=True)])


def decode(
    target: Any, drafter: Drafter, requests: Iterable[Request], **options: Any
) -> list[list[Step]]:
    """Runs all requests on an engine of their own to the end; the steps of each.

    It has a row for each of them, but not more than 100, because to admit the n-th row takes time
    that grows with n.
    """
    requests = list(requests)
    rows = min(max(1, len(requests)), 100)
    engine = Engine(target, drafter, **{"max_rows": rows} | options)
    ids = [engine.add(request) for request in requests]
    steps = drain(engine)
    return [steps[id] for id in ids]


def drain(engine: Engine, steps: dict[int, list[Step]] | None = None) -> dict[int, list[Step]]:
    """Run an engine until it is idle. Return each request's steps, the given ones first."""
    steps = {} if steps is None else steps
    while engine.busy:
        take_step(engine, steps)
    return steps


def take_step(engine: Engine, steps: dict[int, list[Step]]) -> None:
    for step in engine.step():
        steps.setdefault(step.id, []).append(step)


def tokens_of(steps: Iterable[Step]) -> list[int]:
    """The output that steps add up to."""
    return [token for step in steps for token in step.tokens]


def piecemeal(drafter: Drafter, tokens: Sequence[int], begin: int) -> list[int]:
    """What is drafted after a text that came token by token from `begin` on.

    Another text comes and goes beside it.
    """
    seq = EngineSequence(Request(tokens[:begin], 100), 0)
    other = EngineSequence(Request([3, 2, 1, 0], 9), 1)
    list(drafter.admit(seq, None, 8))
    for count, token in enumerate(tokens[begin:]):
        if count % 3 == 0:
            list(drafter.admit(other, None, 8))
        drafter.propose([[seq], [other, seq], [seq, other]][count % 3])
        if count % 3 == 2:
            drafter.drop(other)
        seq.tokens.append(token)
    (draft,) = drafter.propose([seq]).drafts
    for each in (seq, other):
        drafter.drop(each)
    return draft.tokens[1:]


def p_value(outcomes: Sequence[Sequence[int]], joint: Tensor) -> float:
    """The p-value (chi-square) of token tuples under their joint distribution.

    It is 0 if one of them is impossible.
    """
    size = len(joint)
    ids = torch.tensor([list(outcome) for outcome in outcomes])
    flat = sum(ids[:, i] * size ** (ids.shape[1] - 1 - i) for i in range(ids.shape[1]))
    expected, order = joint.double().flatten().mul(len(ids) / joint.double().sum()).sort()
    observed = torch.bincount(flat, minlength=joint.numel())[order].double()
    if observed[expected == 0].any():
        return 0.0
    # The test needs about five expected in each bin: the rarest outcomes are one bin.
    rare = int((expected.cumsum(0) < 5).sum()) + 1
    rare = max(rare, int((expected < 5).sum()))
    bins = [
        torch.cat([each[:rare].sum(0, keepdim=True), each[rare:]]).numpy()
        for each in (observed, expected)
    ]
    return float(chisquare(bins[0], bins[1] * (bins[0].sum() / bins[1].sum())).pvalue)


TARGET = random_table(4, 1, 1.3)
DRAFT = random_table(4, 2, 1.3)
PROMPT = [0, 1, 2, 3, 2, 1, 0, 1]  # of their tokens, with a few n-grams to look up


def sampled(
    make: Callable[[], Drafter],
    batch: int,
    batches: int,
    processors: LogitsProcessorList | None = None,
    target: TableLM | None = None,
) -> list[list[Step]]:
    """The steps of many sampled requests of PROMPT, in batches that have a drafter each."""
    asked = Request(
        PROMPT, 5, Sampler(False, processors), generator=torch.Generator().manual_seed(0)
    )
    target = target or TableLM(TARGET)
    return [steps for _ in range(batches) for steps in decode(target, make(), [asked] * batch)]


def fit(
    rows: Iterable[Iterable[Step]],
    table: Tensor = TARGET,
    prompt: Sequence[int] = PROMPT,
    length: int = 3,
    processors: LogitsProcessorList | None = None,
) -> float:
    """The `p_value` of the first `length` tokens of rows of steps after the prompt.

    The target is a TableLM.
    """

    def model(ids: Tensor) -> Any:
        before, last = [0, *ids[0].tolist()][-2:]
        return SimpleNamespace(logits=table[before, last][None, None].clone())

    joint = joint_distribution(model, prompt, length, processors)
    return p_value([tokens_of(steps)[:length] for steps in rows], joint)


def refuses(message: str, call: Callable[..., Any], /, *given: Any, **named: Any) -> None:
    """Assert that a call raises a ValueError of one line that matches the message."""
    with pytest.raises(ValueError, match=message) as error:
        call(*given, **named)
    text = str(error.value)
    del error  # whose traceback would keep open what the call has opened
    assert "\n" not in text


def refused_file(path: Path) -> str:
    """Return the line in which a GGUF file is refused. It names the file, or a piece of it."""
    with pytest.raises(ValueError, match=r"^cannot load '.*\.gguf': .+$") as caught:
        load_gguf(path)
    message = str(caught.value)
    assert f"'{path.parent}" in message and "\n" not in message
    return message


def rows_of(
    weight: Tensor, bias: Tensor | None = None
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """What a hot head asks of a whole head's weight [V, d]."""
    bias = torch.zeros(len(weight)) if bias is None else bias
    return lambda tokens: (weight[tokens], bias[tokens])


def drafts_as_plain(decoder: Any, prompts: list[Any], plain: list[list[int]]) -> None:
    """Check that batches of several sizes are drafted, and have the output of plain decoding."""
    for batch, outputs in (
        (prompts[1:2], plain[1:2]),
        (prompts[:2], plain[:2]),
        (prompts, plain),
        (prompts * 4, plain * 4),
    ):
        done = decoder.generate(batch, max_new_tokens=24, ignore_eos=True)
        assert [row.tokens for row in done] == outputs
        assert sum(row.stats.drafted for row in done) > 0
