"""The prompt cache on disk: after a restart a text has the same bits and is not run again."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import forerun
from forerun.api.decoder import Decoder
from forerun.backends import prepare
from forerun.backends.identity import identity
from forerun.backends.stored import store
from forerun.methods import method
from forerun.model import prompt_folder
from forerun.model.causal_lm import CausalLM
from forerun.model.prompt_folder import PromptFolder
from forerun.model.segments import MIN_SEGMENT, SEGMENT_LENGTH
from forerun.model.shelf import Shelf
from tests.support import commands, families
from tests.support.local import LOCAL
from tests.support.processes import health, started
from tests.support.serving import until
from tests.support.shelves import LARGE, put, random_text, read, shelf_in, whole
from tests.support.toys import (
    extend,
    noisy_copy,
    parts_of,
    refuses,
    save_models,
    tiny,
    tiny_tokenizer,
)

LONG: dict[str, Any] = {"max_position_embeddings": 4096}
FORMS: dict[str, Callable[[], CausalLM]] = {
    "float32 in C": lambda: prepare(families.tiny("llama", **LONG)),
    "few bits": lambda: prepare(store(families.tiny("smollm3", **LONG), "int8")),
    "transformers": lambda: CausalLM(tiny("llama", context=4096)),
    "windows": lambda: CausalLM(tiny("gemma3", context=4096)),
    "layers without buffers": lambda: CausalLM(tiny("gemma4", context=4096)),
}
OTHER = "1" * 32


def begun(model: CausalLM, path: Path, prefix_bytes: int = 2**24, limit: int = LARGE) -> CausalLM:
    """The model as after a start of its process."""
    fresh = model.fresh(prefix_bytes)
    digest = identity(model)
    assert digest is not None
    fresh.keep_in(PromptFolder(path, limit), digest)
    return fresh


def shelf_of(model: CausalLM) -> Shelf:
    shelf = model.prompts.shelf
    assert shelf is not None
    return shelf


def written(model: CausalLM) -> None:
    assert shelf_of(model).folder.wait(60)


def run(model: CausalLM, text: Sequence[int], capture: Any = "", salt: str = "") -> int:
    """Read a prompt; return the number of tokens that were run."""
    return sum(model.prefill(text, 512, salt, capture))


def save_text(model: CausalLM, text: Sequence[int], capture: Any = "", salt: str = "") -> None:
    """Read a prompt, and save it as the text of a request that has ended."""
    run(model, text, capture, salt)
    model.join(1)
    model.save_prefix(1, text, model.prompt_hidden, salt, capture)
    model.drop(1)
    model.forget_prompt()
    written(model)


def states(model: CausalLM, length: int) -> list[torch.Tensor]:
    """Keys and values of the last prompt."""
    stored = model.prompts.cache.view(0, length)
    return [part.clone() for pair in stored if pair is not None for part in pair]


def assert_same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*/*.safetensors"))


# Bits.


@pytest.mark.parametrize("capture", ["", "head", (1, 2)])
@pytest.mark.parametrize("form", FORMS)
def test_a_text_from_disk_has_the_bits_of_one_that_was_run(
    form: str, capture: Any, tmp_path: Path
) -> None:
    model = FORMS[form]()
    text = random_text(700)
    first = begun(model, tmp_path)
    assert run(first, text, capture) == 700
    wanted = states(first, 700)
    hidden = first.prompt_hidden
    first.forget_prompt()
    save_text(first, text, capture)
    again = begun(model, tmp_path)
    assert run(again, text, capture) == 0 and again.prefilled == 0
    assert_same(states(again, 700), wanted)
    if hidden is not None:
        assert again.prompt_hidden is not None and torch.equal(again.prompt_hidden, hidden)
    for lm in (first, again):
        run(lm, text, capture)
        lm.join(7)
    one, other = (extend(lm, [7], [[5, 6, 9]]) for lm in (first, again))
    assert torch.equal(one.logits[0], other.logits[0])
    assert again.memory().read == again.memory().hits == 700 and again.memory().disk > 0


@pytest.mark.parametrize("form", ["float32 in C", "transformers"])
def test_a_text_goes_on_after_what_memory_has(form: str, tmp_path: Path) -> None:
    model = FORMS[form]()
    text = random_text(900)
    save_text(begun(model, tmp_path), text)
    other = begun(model, tmp_path)
    assert run(other, [*text[:300], 1, 2]) == 2  # from disk, and then in memory
    assert run(other, [*text, 1, 2]) == 2  # 300 tokens are in the row, 600 on disk
    whole = begun(model, tmp_path / "none")
    run(whole, [*text, 1, 2])
    if model.exact == "bitwise":
        assert_same(states(other, 902), states(whole, 902))
    assert other.memory().read == 900


def test_without_a_prefix_store_texts_are_on_disk_alone(tmp_path: Path) -> None:
    model = FORMS["float32 in C"]()
    text = random_text(520)
    save_text(begun(model, tmp_path, prefix_bytes=0), text)
    assert run(begun(model, tmp_path, prefix_bytes=0), [*text[:510], 4]) == 1


def test_a_prompt_is_written_before_its_answer_is_there(tmp_path: Path) -> None:
    model = FORMS["float32 in C"]()
    text = random_text(600)
    first = begun(model, tmp_path)
    run(first, text)
    written(first)
    assert run(begun(model, tmp_path), text) == 600 - 2 * SEGMENT_LENGTH  # whole segments


def test_texts_with_one_beginning_share_its_files(tmp_path: Path) -> None:
    model = FORMS["float32 in C"]()
    text = random_text(600)
    first = begun(model, tmp_path)
    save_text(first, text)
    assert len(files(tmp_path)) == 3
    save_text(first, [*text, *random_text(100, 1)])  # replaces the last one
    assert len(files(tmp_path)) == 3
    save_text(first, text)  # has nothing new
    assert len(files(tmp_path)) == 3
    save_text(first, [*text[:560], *random_text(40, 2)])
    assert len(files(tmp_path)) == 4
    save_text(first, text[:200])  # too short
    assert len(files(tmp_path)) == 4


# Whose text it is.


def test_salts_are_apart_and_unreadable(tmp_path: Path) -> None:
    model = FORMS["float32 in C"]()
    text = random_text(300)
    save_text(begun(model, tmp_path), text, salt="a secret \ud800")
    other = begun(model, tmp_path)
    assert run(other, text) == 300 and run(other, text, salt="another") == 300
    assert run(other, text, salt="a secret \ud800") == 0
    for path in files(tmp_path):
        assert b"secret" not in path.read_bytes() and "secret" not in str(path)


def test_what_decides_the_bits_decides_the_identity() -> None:
    made = families.tiny("llama", **LONG)
    known = {identity(prepare(made)), identity(CausalLM(made))}
    known |= {
        identity(prepare(store(families.tiny("llama"), kind))) for kind in ("int8", "bfloat16")
    }
    known.add(identity(prepare(families.tiny("llama", **LONG, rms_norm_eps=1e-4))))
    assert len(known) == 5 and None not in known
    assert identity(prepare(families.tiny("llama", **LONG))) == identity(prepare(made))
    with torch.no_grad():
        made.model.layers[1].mlp.up_proj.weight[5, 7] += 1e-3  # one of all weights
    assert identity(prepare(made)) not in known


def test_a_model_with_hooks_keeps_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama", context=4096)
    model.model.layers[0].register_forward_hook(lambda *_: None)
    decoder = Decoder(model, method=method("ar"), prompt_cache=tmp_path)
    decoder.generate([random_text(400)], max_new_tokens=4)
    assert not files(tmp_path) and "keeps no text of LlamaForCausalLM" in caplog.text
    model.model.layers[0]._forward_hooks.clear()


@pytest.mark.parametrize("name", ["sd", "lyanna", "eagle"])
def test_drafts_and_heads_find_their_states(name: str, tmp_path: Path) -> None:
    target = families.tiny("llama", **LONG)
    draft = noisy_copy(target, 0.02) if name == "sd" else None
    parts = {} if name == "sd" else parts_of(name, target, draft)

    def decoder(**options: Any) -> Decoder:
        how = {"gamma": 3} if name == "sd" else {}
        return Decoder(target, None, draft, method(name, **how), guard=False, **parts, **options)

    text = random_text(700)
    first = decoder(prompt_cache=tmp_path)
    wanted = first.generate([text], max_new_tokens=20, ignore_eos=True)[0].tokens
    follow_up = [*text, *wanted, 9, 9, 9]
    expected = first.generate([follow_up], max_new_tokens=20, ignore_eos=True)[0]
    assert (
        expected.tokens
        == decoder().generate([follow_up], max_new_tokens=20, ignore_eos=True)[0].tokens
    )
    assert shelf_of(first.engine.target).folder.wait(60)
    second = decoder(prompt_cache=tmp_path)
    found = second.generate([follow_up], max_new_tokens=20, ignore_eos=True)[0]
    assert found.tokens == expected.tokens and found.stats.tau == expected.stats.tau
    assert second.engine.target.prefilled < MIN_SEGMENT
    if name == "sd":
        drafter: Any = second.engine.drafter
        assert drafter.model.prefilled < MIN_SEGMENT


# Damage.


@pytest.fixture(scope="module")
def stored_text(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[CausalLM, list[int], Path, list[torch.Tensor]]:
    path = tmp_path_factory.mktemp("texts")
    model = FORMS["float32 in C"]()
    text = random_text(600)
    first = begun(model, path)
    save_text(first, text, "head")
    run(first, text, "head")
    hidden = first.prompt_hidden
    assert hidden is not None
    return model, text, path, [*states(first, 600), hidden]


def reads_anew(known: tuple[CausalLM, list[int], Path, list[torch.Tensor]], path: Path) -> int:
    """Read the text with a damaged folder, and return how many tokens were run.

    The bits must be those of the model.
    """
    model, text, _, wanted = known
    again = begun(model, path)
    count = run(again, text, "head")
    hidden = again.prompt_hidden
    assert hidden is not None
    assert_same([*states(again, 600), hidden], wanted)
    again.forget_prompt()
    save_text(again, text, "head")
    assert run(begun(model, path), text, "head") == 0  # what was damaged was written again
    return count


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_flipped_bits_are_found(
    stored_text: Any, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("flipped") / "texts"
    shutil.copytree(stored_text[2], path)
    file = data.draw(st.sampled_from(files(path)))
    content = bytearray(file.read_bytes())
    is_header = data.draw(st.booleans())
    place = data.draw(st.integers(0, 1500 if is_header else len(content) - 1))
    content[min(place, len(content) - 1)] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    reads_anew(stored_text, path)
    shutil.rmtree(path)


@pytest.mark.parametrize(
    "damage", ["empty", "short", "half", "text", "swapped", "pickle", "a folder"]
)
def test_damaged_and_foreign_files_are_ignored(
    damage: str, stored_text: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "texts"
    shutil.copytree(stored_text[2], path)
    file = next(candidate for candidate in files(path) if "keys" in candidate.name)
    other = files(path)[-1]
    content = file.read_bytes()
    if damage == "a folder":
        file.unlink()
        file.mkdir()
    else:
        new = {
            "empty": b"",
            "short": content[:-1],
            "half": content[: len(content) // 2],
            "text": b"hello" * 99,
        }
        new |= {"swapped": other.read_bytes(), "pickle": b"\x80\x04."}
        file.write_bytes(new[damage])
    if damage == "a folder":
        model, text, _, wanted = stored_text
        again = begun(model, path)
        run(again, text, "head")
        assert_same(states(again, 600), wanted[:-1])
        written(again)  # which fails, as nothing is removed that is not the cache's
    else:
        assert reads_anew(stored_text, path) > 0
    lines = [message for message in caplog.messages if "is damaged and is ignored" in message]
    assert len(lines) == 1 and file.name in lines[0]


def test_strange_files_are_ignored_with_a_line(
    stored_text: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "texts"
    shutil.copytree(stored_text[2], path)
    (path / "notes.txt").write_text("mine")
    (path / "folder").mkdir()
    inner = files(path)[0].parent / "model.safetensors"
    inner.write_text("mine")
    leftover = inner.with_name(f"{files(path)[0].name}.tmp")
    leftover.write_text("half a file")
    model, text, *_ = stored_text
    again = begun(model, path)
    assert run(again, text, "head") == 0
    save_text(again, random_text(300, 5), "head")
    assert sorted(each.split("/")[-1].split()[0] for each in set(caplog.messages)) == [
        *("folder", "model.safetensors", "notes.txt")
    ]
    assert (path / "notes.txt").exists() and inner.exists() and not leftover.exists()


def test_a_full_disk_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = begun(FORMS["float32 in C"](), tmp_path)
    monkeypatch.setattr(prompt_folder, "_write_file", full)
    for seed in range(3):
        save_text(model, random_text(300, seed))
    assert caplog.messages == [f"a text is not kept in {tmp_path}: No space left on device"]
    monkeypatch.undo()
    save_text(model, random_text(300))
    assert len(files(tmp_path)) == 2


# The folder.


def test_the_folder_is_the_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "folder"
    save_text(begun(FORMS["float32 in C"](), path), random_text(300))
    for each, mode in ((path, 0o700), (files(path)[0].parent, 0o700), (files(path)[0], 0o600)):
        assert stat.S_IMODE(each.stat().st_mode) == mode
    path.chmod(0o770)
    refuses("others may write in the folder", PromptFolder, path, LARGE)
    refuses("cannot make the folder", PromptFolder, files(path)[0], LARGE)
    model = tiny("llama")
    refuses("others may write in the folder", forerun.load, model, method="ar", prompt_cache=path)
    refuses("prompt_cache_bytes must be at least 1", forerun.load, model, prompt_cache_bytes=0)


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    refuses("belongs to another user", PromptFolder, tmp_path, LARGE)


@pytest.mark.parametrize(
    "command", [("generate", "hello"), ("chat", "hello", "--target", "embedded"), ("serve",)]
)
def test_the_command_line_refuses_a_folder_in_one_line(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    done = commands.run(*command, "--prompt-cache", str(tmp_path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("forerun: others may write in the folder")


# Its size, and what it finds, beside a dictionary.

PARTS = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([1, 15, 16, 60, 200, 256, 300])),
    min_size=1,
    max_size=5,
)
TEXTS = PARTS.map(lambda parts: [token for token, count in parts for _ in range(count)])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TEXTS, st.sampled_from(["", "salt"])), min_size=1, max_size=8))
def test_what_is_found_is_what_a_dictionary_has(
    tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[list[int], str]]
) -> None:
    path = tmp_path_factory.mktemp("texts")
    shelf = shelf_in(path)
    known = dict[str, list[list[int]]]({"": [], "salt": []})
    for text, salt in texts:
        lengths = [0]
        for other in known[salt]:
            same = next(
                (i for i, (a, b) in enumerate(zip(other, text, strict=False)) if a != b), None
            )
            lengths.append(len(whole(text[: min(len(other), len(text)) if same is None else same])))
        for reader in (shelf, shelf_in(path)):
            assert reader.known(text, salt) == max(lengths) == read(reader, text, salt=salt)
        held = len(text) // 2
        assert read(shelf, text, held, salt) == (
            max(lengths) if max(lengths) >= held + MIN_SEGMENT else held
        )
        put(shelf, text, salt)
        if len(text) >= SEGMENT_LENGTH:
            known[salt].append(whole(text))
    assert (
        shelf_in(path).folder.bytes
        == shelf.folder.bytes
        == sum(file.stat().st_size for file in files(path))
    )
    shutil.rmtree(path)


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    texts = [random_text(2 * SEGMENT_LENGTH, seed) for seed in range(4)]
    put(shelf_in(tmp_path), texts[0])
    size = files(tmp_path)[0].stat().st_size
    shelf = shelf_in(tmp_path, limit=5 * size)
    put(shelf, texts[1])
    assert read(shelf, texts[0]) == 2 * SEGMENT_LENGTH  # used
    put(shelf, texts[2])
    assert [shelf.known(text, "") for text in texts] == [
        2 * SEGMENT_LENGTH,
        SEGMENT_LENGTH,
        2 * SEGMENT_LENGTH,
        0,
    ]
    assert shelf.folder.bytes == 5 * size
    other = shelf_in(tmp_path, 5 * size, OTHER)  # another model in the same folder
    put(other, texts[3])
    assert other.known(texts[3], "") == 2 * SEGMENT_LENGTH and other.known(texts[0], "") == 0
    assert [shelf.known(text, "") for text in texts] == [SEGMENT_LENGTH, 0, 2 * SEGMENT_LENGTH, 0]
    put(shelf, random_text(20 * SEGMENT_LENGTH, 9))  # its beginning is kept
    assert (
        shelf.known(random_text(20 * SEGMENT_LENGTH, 9), "") == 5 * SEGMENT_LENGTH
        and len(files(tmp_path)) == 5
    )
    shelf_in(tmp_path, limit=10)
    put(shelf_in(tmp_path, limit=10), texts[0])  # there is no room for anything
    assert not files(tmp_path)


def test_files_may_vanish(tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path)
    text = random_text(4 * SEGMENT_LENGTH)
    put(shelf, text)
    segments = sorted(files(tmp_path), key=lambda file: -file.stat().st_mtime_ns)
    segments[2].unlink()
    assert shelf.known(text, "") == read(shelf, text) == 2 * SEGMENT_LENGTH
    reading = shelf.read(text, 0, "", "")
    next(reading)
    segments[1].unlink()
    assert not list(reading)
    put(shelf, text)
    assert read(shelf, text) == 4 * SEGMENT_LENGTH
    shutil.rmtree(tmp_path)
    assert shelf.known(text, "") == read(shelf, text) == 0


# Processes.

WRITER = """
import sys
from pathlib import Path
from forerun.model.segments import SEGMENT_LENGTH
from tests.support.shelves import put, random_text, read, shelf_in
path, number = Path(sys.argv[1]), int(sys.argv[2])
shelf = shelf_in(path, limit=20 * int(sys.argv[3]))
shared = random_text(2 * SEGMENT_LENGTH)
for turn in range(12):
    text = [*shared, *random_text(3 * SEGMENT_LENGTH + 40, 100 * number + turn)]
    put(shelf, text)
    assert read(shelf, text) in (len(text), *range(0, 6 * SEGMENT_LENGTH, SEGMENT_LENGTH))
    assert read(shelf, shared) in (0, SEGMENT_LENGTH, 2 * SEGMENT_LENGTH)
"""


@pytest.mark.slow
def test_two_processes_may_share_a_folder(tmp_path: Path) -> None:
    put(shelf_in(tmp_path), random_text(2 * SEGMENT_LENGTH))
    size = files(tmp_path)[0].stat().st_size
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                commands.running(str(tmp_path), str(number), str(size), program=WRITER)
            )
            for number in range(2)
        ]
        for writer in writers:
            assert not writer.stderr.read() and writer.wait(300) == 0
    assert sum(each.stat().st_size for each in files(tmp_path)) <= 20 * size
    assert not list(tmp_path.glob("*/*.tmp"))
    assert read(shelf_in(tmp_path), random_text(2 * SEGMENT_LENGTH)) == 2 * SEGMENT_LENGTH


PROGRAM = """
import json, sys
import forerun
decoder = forerun.load({target!r}, method="ar", weights="int8", prompt_cache={folder!r})
print(json.dumps([decoder.generate([{text!r}], max_new_tokens=12, ignore_eos=True)[0].tokens,
                  decoder.engine.target.prefilled, decoder.engine.target.memory().read]))
"""


@pytest.mark.slow
def test_another_process_says_the_same_and_reads_only_new_tokens(tmp_path: Path) -> None:
    target = str(save_models(tmp_path, target=families.tiny("llama", **LONG)) / "target")
    text = random_text(600)
    known = str(tmp_path / "texts")

    def asked(text: list[int], folder: str) -> tuple[list[int], int, int]:
        done = commands.run(program=PROGRAM.format(target=target, folder=folder, text=text))
        assert not done.returncode, done.stderr
        tokens, prefilled, read = json.loads(done.stdout.splitlines()[-1])
        return tokens, prefilled, read

    tokens, prefilled, hits = asked(text, known)
    assert (prefilled, hits) == (599, 0)
    follow_up = [*text, *tokens, 8, 8]
    again = asked(follow_up, known)  # written at the end of the first process
    assert again[0] == asked(follow_up, str(tmp_path / "none"))[0]
    assert again[1:] == (len(follow_up) - 1 - 611, 611)


@pytest.mark.slow
def test_a_server_that_was_killed_answers_a_follow_up_alike(tmp_path: Path) -> None:
    model = families.tiny("llama", **LONG, vocab_size=300)
    target = save_models(tmp_path, tiny_tokenizer(), target=model) / "target"
    options = (
        "--target",
        str(target),
        "--method",
        "suffix",
        "--prompt-cache",
        str(tmp_path / "texts"),
    )

    def ask(url: str, prompt: list[int]) -> dict[str, Any]:
        body = {
            "prompt": prompt,
            "max_tokens": 30,
            "ignore_eos": True,
            "temperature": 0,
            "logprobs": 1,
        }
        answer = httpx.post(url + "/v1/completions", json=body, timeout=200, **LOCAL)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["choices"][0])

    def figures(url: str) -> dict[str, float]:
        lines = httpx.get(url + "/metrics", **LOCAL).text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("forerun:pr")]
        return {name: float(value) for name, value in pairs}

    text = random_text(1000)
    follow_up = [*text, 7, 8, 9]
    start = len(text) // SEGMENT_LENGTH * SEGMENT_LENGTH  # of the segment with the new tokens

    def has_follow_up(file: Path) -> bool:
        tokens = load_file(file)["tokens"].tolist()
        return tokens[: len(follow_up) - start] == follow_up[start:]

    with started(*options) as (process, url):
        until(lambda: health(url) == 200, 250)
        ask(url, text)
        wanted = ask(url, follow_up)
        until(lambda: any(map(has_follow_up, files(tmp_path / "texts"))), 60)
        until(lambda: figures(url)["forerun:prompt_cache_bytes"] > 0, 60)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    with started(*options) as (process, url):
        until(lambda: health(url) == 200, 250)
        before = figures(url)
        found = ask(url, follow_up)
        after = figures(url)
    assert (found["text"], found["logprobs"]) == (wanted["text"], wanted["logprobs"])
    read = after["forerun:prompt_cache_hits_total"] - before["forerun:prompt_cache_hits_total"]
    assert read == len(follow_up) - 1  # all of it: nothing was run again
