"""What `load` makes of folders.

Pairs of tokenizers, padded vocabularies, broken checkpoints and device maps.
"""

import json
import os
import shutil
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, normalizers
from transformers import LogitsProcessorList, PreTrainedModel, SuppressTokensLogitsProcessor

import forerun
from benchmarks.training.quantise import save_quantised
from forerun import Decoder
from forerun.api import loading
from forerun.api.layers import load_head, load_pre_verifier
from forerun.api.loading import translation_for
from forerun.drafters.model_chain import ChainDrafter
from forerun.engine.sequence import Request, Sequence
from forerun.methods import AR, SD
from forerun.model.causal_lm import CausalLM
from forerun.model.eager import EagerForward
from forerun.planning.stop_rules import FixedLength
from forerun.sampling.sampler import Sampler
from forerun.zoo.quantise import WEIGHTS
from tests.support import families
from tests.support.toys import (
    noisy_copy,
    random_head,
    random_layer,
    refuses,
    save_models,
    tiny,
    tiny_tokenizer,
)

PROMPTS = ["the cat sat", "def add(a", "for"]


def changed(
    old: str = "{", new: str = "{", more: str | None = None, lowercase: bool = False
) -> Any:
    """The toys' tokenizer with a replaced text in its file, an added token or normaliser."""
    text = tiny_tokenizer().backend_tokenizer.to_str()
    assert old in text
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text.replace(old, new))
    )
    if more:
        tokenizer.add_tokens([more])
    if lowercase:
        tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    target = tiny("llama", vocab=len(tiny_tokenizer()))
    save_models(root, target=target)
    noisy_copy(target, 0.02).save_pretrained(root / "draft")
    return root


@pytest.fixture
def copies(folders: Path, tmp_path: Path) -> Path:
    shutil.copytree(folders, tmp_path / "copies")
    return tmp_path / "copies"


def test_differing_tokenizers_are_named(copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first difference, before weights are loaded."""
    draft = copies / "draft"
    tokenizer = tiny_tokenizer()
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", fail)
    for other, difference in (
        (changed('"~"', '"<tilde>"'), r"token \d+ is '<tilde>' there and '~' in the target's"),
        (changed(more="<new>"), "token 300 is '<new>' there and missing in the target's"),
        (
            changed(lowercase=True),
            r"of the text .*SHE'LL.*, token number 0 is \d+ there and \d+ in the target's",
        ),
    ):
        other.save_pretrained(draft)
        message = (
            rf"method 'ouroboros' needs .* tokenizer, and that of '.*draft' differs: {difference}"
        )
        refuses(message, forerun.load, copies / "target", draft=draft, method="ouroboros")
        target = tiny("llama", vocab=300)
        refuses(
            difference, forerun.load, target, draft=draft, tokenizer=tokenizer, method="ouroboros"
        )
        refuses(f"vLLM needs .* differs: {difference}", translation_for, tokenizer, draft, "vLLM")
    message = "token 300 is missing there and '<new>' in the target's"
    refuses(message, translation_for, changed(more="<new>"), copies / "target", "vLLM")


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_draft_folder_with_the_same_tokenizer_or_none_is_taken(
    has_tokenizer: bool, copies: Path
) -> None:
    if has_tokenizer:
        tokenizer = changed()
        assert (
            tokenizer.eos_token is None and tiny_tokenizer().eos_token is not None
        )  # special roles do not count
        tokenizer.save_pretrained(copies / "draft")
    decoder = forerun.load(copies / "target", draft=copies / "draft", guard=False)
    names = [
        f"{part} {copies.name}/{part} in {kind}"
        for part, kind in (("target", "float32"), ("draft", "Q8_0"))
    ]
    assert repr(decoder) == f"Decoder({', '.join(names)}, method sd)"
    plain = forerun.load(copies / "target", method="ar")
    done = decoder.generate(PROMPTS, max_new_tokens=12)
    assert [row.tokens for row in done] == [
        row.tokens for row in plain.generate(PROMPTS, max_new_tokens=12)
    ]
    assert sum(row.stats.accepted for row in done)


def resized(model: PreTrainedModel, size: int) -> PreTrainedModel:
    """A copy with rows cut from, or random ones put behind, its embeddings."""
    copy = noisy_copy(model, 0.02)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        copy.resize_token_embeddings(size, mean_resizing=False)
    return copy


@pytest.mark.parametrize(("ours", "theirs"), [(300, 320), (320, 300), (310, 320)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_vocabularies_of_other_sizes_draft(
    ours: int, theirs: int, temperature: float
) -> None:
    base = tiny("llama", vocab=300)
    target = resized(base, ours)
    draft = resized(base, theirs)
    options = {
        "max_new_tokens": 24,
        "temperature": temperature,
        "seed": 5,
        "top_k": 9 if temperature else 0,
    }
    decoder = Decoder(target, tiny_tokenizer(), draft, SD(3), guard=False)
    done = decoder.generate(PROMPTS, **options)
    assert sum(row.stats.accepted for row in done)
    assert max(token for row in done for token in row.tokens) < ours
    if not temperature:
        plain = Decoder(target, tiny_tokenizer(), None, AR()).generate(PROMPTS, **options)
        assert [row.tokens for row in done] == [row.tokens for row in plain]


def test_distributions_of_a_draft_have_the_targets_length_and_no_mass_where_it_has_no_token() -> (
    None
):
    base = tiny("llama", vocab=300)
    for size, theirs in ((320, 300), (300, 320)):
        drafter = ChainDrafter(CausalLM(resized(base, theirs)), FixedLength(3), size)
        seq = Sequence(Request([5, 6, 7], 20, Sampler(greedy=False)))
        assert sum(drafter.admit(seq, None, 8)) == 2
        q = drafter.propose([seq]).drafts[0].q
        assert q is not None and q.shape == (3, size)
        torch.testing.assert_close(q.sum(-1), torch.ones(3))
        assert not q[:, 300:].any() and q[:, :300].all()


@pytest.mark.parametrize("sampled", [False, True])
def test_after_a_token_that_the_draft_lacks_its_row_is_decoded_without_it(sampled: bool) -> None:
    def force_the_ninth(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(scores, -torch.inf).index_fill_(-1, torch.tensor([315]), 0.0)
        return only if input_ids.shape[1] == 9 else scores

    base = tiny("llama", vocab=300)
    target = resized(base, 320)
    draft = resized(base, 300)
    # Row 0 begins with such a token, row 1 gets one, row 2 is too long for that.
    prompts = [[4, 310, 6], [7, 8, 9, 10], list(range(20, 31))]
    processors = LogitsProcessorList(
        [SuppressTokensLogitsProcessor(list(range(300, 320))), force_the_ninth]
    )
    options = {
        "max_new_tokens": 20,
        "temperature": float(sampled),
        "ignore_eos": True,
        "logits_processor": processors,
    }
    torch.manual_seed(0)
    decoder = Decoder(target, tiny_tokenizer(), draft, SD(3), guard=False)
    done = decoder.generate(prompts, **options)
    assert [row.finish_reason for row in done] == ["length"] * 3 and done[1].tokens[5] == 315
    assert done[0].stats.drafted == 0
    counts = accumulate(len(step.tokens) for step in done[1].steps)
    after = [
        step.drafted for step, count in zip(done[1].steps[1:], counts, strict=False) if count > 5
    ]
    assert after and not any(after) and any(step.drafted for step in done[1].steps)
    assert all(step.drafted for step in done[2].steps[:-1])
    if not sampled:
        wanted = Decoder(target, tiny_tokenizer(), None, AR()).generate(prompts, **options)
        assert [row.tokens for row in done] == [row.tokens for row in wanted]


def test_sizes_differ_by_padding_alone() -> None:
    for ours, theirs, tokenizer, says in (
        (300, 320, None, "no tokenizer says"),
        (300, 290, tiny_tokenizer(), "the tokenizer 300"),
        (290, 300, tiny_tokenizer(), "the tokenizer 300"),
    ):
        target, draft = (resized(tiny("llama", vocab=300), size) for size in (ours, theirs))
        with pytest.raises(
            ValueError, match=f"has {theirs} entries, the target's {ours}, and {says}"
        ):
            forerun.load(target, draft=draft, tokenizer=tokenizer)


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    # For this one transformers would make up an empty tokenizer.
    transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4).save_pretrained(folder)


def claiming(folder: Path, **sizes: int | str) -> None:
    """Write a configuration that says something else than the files have."""
    config = json.loads((folder / "config.json").read_text())
    assert sizes.keys() <= config.keys()
    (folder / "config.json").write_text(json.dumps(config | sizes))


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def truncated(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1000)


def pickled_rubbish(folder: Path) -> None:
    without("model.safetensors")(folder)
    (folder / "pytorch_model.bin").write_bytes(b"rubbish")


def lacking_one(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def typed(name: str) -> Callable[[Path], None]:
    return lambda folder: (
        (folder / "config.json").write_text(json.dumps({"model_type": name})) and None
    )


BROKEN = [
    ("target", typed("forerun-hidden"), "--target '.*target': this is a head: --head$"),
    (
        "draft",
        typed("forerun-pre-verifier"),
        "--draft '.*draft': this is a pre-verifier: --pre-verifier$",
    ),
    (
        "target",
        emptied,
        "cannot load the tokenizer of '.*target': the folder has no tokenizer files",
    ),
    (
        "target",
        without_tokenizer,
        "cannot load the tokenizer of '.*target': the folder has no tokenizer files",
    ),
    ("target", without("config.json"), "cannot load target '.*target': .*config.json"),
    (
        "target",
        without("model.safetensors"),
        "cannot load target '.*target': .*no file named model.safetensors",
    ),
    ("target", truncated, "cannot load target '.*target': .*header"),
    ("target", pickled_rubbish, "cannot load target '.*target': "),
    (
        "target",
        lacking_one,
        "cannot load target '.*': no weights for model.layers.1.mlp.up_proj.weight$",
    ),
    (
        "target",
        lambda folder: claiming(folder, intermediate_size=96),
        "cannot load target '.*target': ",
    ),
    ("draft", truncated, "cannot load draft '.*draft': "),
]


@pytest.mark.parametrize(("part", "breaks", "message"), BROKEN)
def test_broken_folders_are_named_in_one_line(
    part: str, breaks, message: str, copies: Path
) -> None:
    breaks(copies / part)
    refuses(
        message,
        forerun.load,
        copies / "target",
        draft=copies / "draft" if part == "draft" else None,
    )


def test_a_model_that_is_spread_over_devices_runs_transformers_forwards() -> None:
    model = families.tiny("llama")
    assert not isinstance(forerun.load(model, method="ar").target.backend, EagerForward)
    model.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    assert isinstance(forerun.load(model, method="ar").target.backend, EagerForward)


def fail(*arguments: object, **options: object) -> None:
    raise AssertionError("something is loaded")


def test_sizes_that_do_not_fit_the_weights_are_refused(copies: Path, tmp_path: Path) -> None:
    before = (copies / "draft" / "config.json").read_text()
    for sizes, message in (
        ({"vocab_size": 400}, ""),
        ({"hidden_size": 64}, ""),
        (
            {"num_hidden_layers": 3},
            "no weights for model.layers.2.input_layernorm.weight and 8 more$",
        ),
        (
            {"max_position_embeddings": 10**12},
            "the configuration claims 1000000000000 positions; at most 16777216",
        ),
    ):
        claiming(copies / "draft", **sizes)
        refuses(
            f"^cannot load draft '.*draft': .*{message}",
            forerun.load,
            copies / "target",
            draft=copies / "draft",
        )
        (copies / "draft" / "config.json").write_text(before)
    target = CausalLM(tiny("llama"))
    head = random_head(target)
    for folder, save in (
        ("plain", head.save_pretrained),
        ("small", lambda path: save_quantised(head, path, {})),
    ):
        save(tmp_path / folder)
        load_head(tmp_path / folder, target)
        before = (tmp_path / folder / "config.json").read_text()
        for changed_sizes in (
            {"hot_size": 6},
            {"rank": 7},
            {"num_hidden_layers": 2},
            {"kind": "medusa"},
        ):
            claiming(tmp_path / folder, **changed_sizes)
            refuses("^cannot load the head '.*': ", load_head, tmp_path / folder, target)
            (tmp_path / folder / "config.json").write_text(before)
    layer = random_layer(target.model, target.model)
    layer.save_pretrained(tmp_path / "layer")
    load_pre_verifier(tmp_path / "layer", target, target)
    claiming(tmp_path / "layer", width=64)
    refuses(
        "^cannot load the pre-verifier '.*': ",
        load_pre_verifier,
        tmp_path / "layer",
        target,
        target,
    )
    (tmp_path / "small" / WEIGHTS).write_bytes(b"not tensors")
    refuses("^cannot load the head ", load_head, tmp_path / "small", target)
