"""Batch jobs: every line of the input gets one record, whatever is killed."""

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from openai.types import Completion
from openai.types.chat import ChatCompletion

from forerun.api.decoder import Decoder
from forerun.api.load import load
from forerun.cli.batch_jobs import batch
from forerun.scale.batch_file import CHAT, COMPLETION, BadLine, read_line, scan
from forerun.scale.batch_folder import Folder
from forerun.server import worker
from tests.support import commands
from tests.support.serving import make_decoder, models, until
from tests.support.toys import refuses, save_lines, save_models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return (
        save_models(tmp_path_factory.mktemp("models"), make_decoder().tokenizer, target=models()[0])
        / "target"
    )


def asked(custom_id: str, url: str = COMPLETION, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def records(out: Path) -> list[dict[str, Any]]:
    path = out / "records.jsonl"
    raw = path.read_bytes() if path.exists() else b""
    return [json.loads(each) for each in raw.splitlines(keepends=True) if each.endswith(b"\n")]


def test_a_bad_line_is_named() -> None:
    for line, code, message in (
        (b"x", "invalid_json", "the line is not JSON (column 1)"),
        (b"[" * 100_000, "invalid_json", "the line is not JSON"),
        (b'{"prompt": "\xff"}', "invalid_json", "the line is not JSON"),
        (3, "invalid_line", "must be an object"),
        ({}, "invalid_line", "must have prompt or messages, or custom_id"),
        ({"prompt": "a", "messages": []}, "invalid_line", "must have prompt or messages"),
        ({"prompt": "a", "id": 3}, "invalid_line", "id must be a string of 1 to 512 characters"),
        ({"prompt": "a", "stream": True}, "invalid_line", "stream is not supported in a batch"),
        ({"custom_id": "a"}, "invalid_line", "method is missing"),
        ({"body": {}}, "invalid_line", "custom_id is missing"),
        ({**asked("a"), "method": "GET"}, "invalid_line", "must be POST, not 'GET'"),
        (
            asked("a", "/v1/embeddings"),
            "invalid_line",
            "must be /v1/chat/completions or /v1/completions, not '/v1/emb",
        ),
        ({**asked("a"), "body": []}, "invalid_line", "body must be an object"),
        (asked(""), "invalid_line", "custom_id must be a string"),
    ):
        found = read_line(7, line if isinstance(line, bytes) else json.dumps(line).encode(), {}, {})
        assert found.code == code and message in found.message and found.number == 7


def test_defaults_fill_in_what_a_line_lacks() -> None:
    for line, wanted in (
        ({"prompt": "a", "id": "x"}, {"prompt": "a", "max_tokens": 5, "seed": 2}),
        ({"messages": [], "max_completion_tokens": 9, "seed": 4}, {}),
        (asked("a", CHAT, max_tokens=None), {"max_tokens": 5, "seed": 2}),
    ):
        found = read_line(3, json.dumps(line).encode(), {}, {"max_tokens": 5, "seed": 2**62 - 1})
        assert json.loads(found.body) == (
            wanted if "prompt" in line else line.get("body", line) | wanted
        )


def test_every_kind_of_line_gets_a_record(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "user", "content": "the cat"}]
    source = save_lines(
        tmp_path / "in.jsonl",
        [
            asked(
                "chat \ud83d\ude00",
                CHAT,
                messages=messages,
                max_tokens=8,
                temperature=0,
                logprobs=True,
            ),
            {"prompt": "def add", "id": "plain", "max_tokens": 6, "temperature": 0},
            "",
            "not json",
            {"messages": messages, "temperature": -3},
            asked("plain", prompt="another name, and it is one line up"),
            {"prompt": "the mat", "temperature": 0},
            asked("chat \ud83d\ude00", prompt="a"),
            asked("n", prompt=["aa", "ab"], n=2, max_tokens=3, seed=1, model="tiny"),
            asked("other", prompt="aa", model="gpt-4o"),
        ],
    )
    out = tmp_path / "out"
    run = {"target": str(model), "method": "suffix", "model_name": "tiny"}
    batch(source, out, **run)  # type: ignore[arg-type]
    by_line = {record["line"]: record for record in records(out)}
    assert len(records(out)) == len({record["id"] for record in by_line.values()}) == 9
    status = {
        number: record["response"] and record["response"]["status_code"]
        for number, record in sorted(by_line.items())
    }
    assert status == {1: 200, 2: 200, 4: None, 5: 400, 6: None, 7: 200, 8: None, 9: 200, 10: 404}
    errors = {
        number: record["error"] for number, record in by_line.items() if record["error"] is not None
    }
    codes = {error["line"]: error["code"] for error in errors.values()}
    assert codes == {4: "invalid_json", 6: "duplicate_custom_id", 8: "duplicate_custom_id"}
    assert all(error["message"].startswith(f"line {number}: ") for number, error in errors.items())
    assert errors[6]["message"].endswith("custom_id 'plain' was used on line 2 already")
    assert [by_line[number]["custom_id"] for number in (1, 2, 8)] == [
        "chat \U0001f600",
        "plain",
        None,
    ]
    assert by_line[1]["response"]["request_id"]
    body = {
        number: record["response"]["body"]
        for number, record in by_line.items()
        if record["response"]
    }
    assert (
        body[5]["error"]["param"] == "temperature"
        and body[10]["error"]["code"] == "model_not_found"
    )

    decoder = load(model, method="ar")
    chat = ChatCompletion.model_validate(body[1])
    text = Completion.model_validate(body[2])
    assert chat.choices[0].message.content == decoder.chat(messages, max_new_tokens=8).text
    assert chat.choices[0].logprobs is not None
    assert text.choices[0].text == decoder.generate("def add", max_new_tokens=6).text
    assert body[7]["usage"]["completion_tokens"] == 16 and len(body[9]["choices"]) == 4

    summary = json.loads((out / "summary.json").read_text())
    assert [summary[name] for name in ("lines", "answered", "refused", "bad_lines")] == [9, 4, 2, 3]
    for name in ("prompt_tokens", "completion_tokens"):
        assert summary[name] == sum(body[number]["usage"][name] for number in (1, 2, 7, 9))
    assert summary["tau"] == round(summary["completion_tokens"] / summary["steps"], 4) >= 1
    assert summary["last_run"]["answered"] == 4
    assert "9 lines: 4 answered, 2 refused, 3 bad, 0 failed" in capsys.readouterr().out

    before = (out / "records.jsonl").read_bytes()
    batch(source, out, **run)  # type: ignore[arg-type]  # has nothing to do
    assert before == (out / "records.jsonl").read_bytes()
    for options, message in (
        ({"method": "ar"}, r'belongs to a job with method \{"name": "suffix"'),
        ({"seed": 3}, "a job with seed null, not 3"),
        ({}, "belongs to a job with another input"),
    ):
        if not options:
            save_lines(source, ["{}"])
        refuses(message, batch, source, out, **run | options)


def test_a_seed_decides_what_is_said_and_rows_do_not(model: Path, tmp_path: Path) -> None:
    source = save_lines(tmp_path / "in.jsonl", [{"prompt": "the cat"}] * 6)
    texts = []
    for rows in (1, 5):
        out = tmp_path / f"out{rows}"
        refuses(
            "unknown dtype", batch, source, out, target=str(model), method="suffix", dtype="float12"
        )
        batch(
            source,
            out,
            target=str(model),
            method="suffix",
            seed=5,
            max_new_tokens=20,
            max_rows=rows,
        )
        texts.append(
            {each["line"]: each["response"]["body"]["choices"][0]["text"] for each in records(out)}
        )
    assert texts[0] == texts[1] and len(set(texts[0].values())) == 6


LOADED = worker.loaded


def breaking(*how: Any) -> Decoder:
    """One whose engine fails in each step while it has a prompt of 100 times "!"."""
    decoder = LOADED(*how).replace(
        kv_memory=2**28, prefix_bytes=2**28
    )  # else a worker would replace it
    engine = decoder.engine
    fatal = set[int]()
    add = engine.add
    abort = engine.abort
    advance = engine.advance
    fails = decoder.tokenizer.encode("!" * 100)[-8:]  # type: ignore[union-attr]

    def breaking_add(request: Any, id: int) -> Any:
        if request.tokens[-8:] == fails:
            fatal.add(id)
        return add(request, id)

    def breaking_advance() -> None:
        if fatal:
            raise RuntimeError("no memory")
        advance()

    engine.add, engine.advance = breaking_add, breaking_advance  # type: ignore[method-assign,assignment]
    engine.abort = lambda id: fatal.discard(id) or abort(id)  # type: ignore[method-assign,func-returns-value]
    return decoder


@pytest.mark.slow
def test_what_failed_is_asked_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any
) -> None:
    prompts = [f"the cat {i}" for i in range(9)]
    prompts[2] = "!" * 100
    source = save_lines(
        tmp_path / "in.jsonl", [*({"prompt": prompt, "max_tokens": 4} for prompt in prompts), "x"]
    )
    out = tmp_path / "out"
    run = {"target": str(model), "method": "suffix", "max_rows": 2}
    with monkeypatch.context() as patch:
        patch.setattr(worker, "loaded", breaking)
        for _ in range(2):  # the second time the one line is asked again, and fails again
            with pytest.raises(typer.Exit) as ended:
                batch(source, out, **run)  # type: ignore[arg-type]
            assert ended.value.exit_code == 1
            printed = capsys.readouterr()
            assert "10 lines: 8 answered, 0 refused, 1 bad, 1 failed" in printed.out
            assert "1 lines failed; run the same command again" in printed.err
            assert (
                "line 3 has no answer: " in caplog.text
                and "decoding failed: RuntimeError" in caplog.text
            )
            assert sorted(record["line"] for record in records(out)) == [1, 2, 4, 5, 6, 7, 8, 9, 10]
            assert json.loads((out / "summary.json").read_text())["failed"] == 1
    batch(source, out, **run)  # type: ignore[arg-type]
    assert sorted(record["line"] for record in records(out)) == list(range(1, 11))
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["answered"], summary["failed"], summary["last_run"]["answered"]) == (9, 0, 1)


def test_a_full_disk_is_one_line_and_the_job_goes_on_later(tmp_path: Path) -> None:
    source = scan(save_lines(tmp_path / "in.jsonl", ["x"] * 4))
    out = tmp_path / "out"
    first, *others = [BadLine(i, None, "code", "why" * 40) for i in range(1, 5)]
    folder = Folder(out, source, {})
    folder.refuse(first)
    size = (out / "records.jsonl").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + size // 2, limits[1]))
    try:
        refuses(r"cannot write to .*out: File too large", folder.refuse, others[0])
        refuses("cannot write to", folder.close)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
        refuses(r"cannot write to .*out: File too large", folder.summarise, 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (out / "records.jsonl").stat().st_size == size + size // 2
    assert {path.name for path in out.iterdir()} == {"job.json", "records.jsonl", ".lock"}
    folder = Folder(out, source, {})
    assert folder.done == {1}
    for bad_line in others:
        folder.refuse(bad_line)
    folder.close()
    assert folder.ended and [record["line"] for record in records(out)] == [1, 2, 3, 4]


# A command that ends while it computes: the disk becomes full, or it is told to end.
ENDING = {
    "full": """
import resource
import sys
from forerun import cli

sys.dont_write_bytecode = True  # Python would keep what the limit leaves of it
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
cli.main()
""",
    "told": """
import os
import signal
import sys
import threading
import time
from pathlib import Path
from forerun import cli

def end():
    records = Path(sys.argv[3]) / "records.jsonl"
    while not records.exists() or not records.stat().st_size:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end).start()
cli.main()
""",
}


@pytest.mark.parametrize(
    ("how", "status", "line"),
    [("full", 2, "cannot write to {out}: File too large"), ("told", 143, "terminated")],
)
def test_a_job_that_ends_while_it_computes_says_one_line(
    how: str, status: int, line: str, model: Path, tmp_path: Path
) -> None:
    lines = [{"prompt": f"the cat {i}", "max_tokens": 200, "logprobs": 5} for i in range(40)]
    out = tmp_path / "out"
    command = ["batch", str(save_lines(tmp_path / "in.jsonl", lines)), str(out)]
    command += ["--target", str(model), "--method", "suffix", "--max-rows", "2"]
    done = commands.run(*command, program=ENDING[how])
    assert done.returncode == status
    said = [each for each in done.stderr.splitlines() if each and " lines" not in each]
    assert said == [f"forerun: {line.format(out=out)}"]
    assert len(records(out)) < len(lines)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_killed_job_goes_on(model: Path, tmp_path: Path) -> None:
    """There is one record a prompt, with what the model alone says, greedily."""
    prompts = [f"for i in range({i}): print" for i in range(24)]
    lines = [asked(prompt, prompt=prompt, max_tokens=160, temperature=0) for prompt in prompts]
    source = save_lines(tmp_path / "in.jsonl", lines)
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "forerun",
        "batch",
        str(source),
        str(out),
        "--target",
        str(model),
    ]
    command += ["--method", "suffix", "--max-rows", "2", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        until(lambda: len(records(out)) >= 3 or process.poll() is not None, 600)
        assert process.poll() is None
        refuses(
            "another process is working on this job",
            batch,
            source,
            out,
            target=str(model),
            method="suffix",
            max_rows=2,
        )
        process.send_signal(signal.SIGKILL)
    before = records(out)
    assert 3 <= len(before) < len(prompts)
    with (out / "records.jsonl").open("ab") as file:  # as if it had been killed within a record
        file.write(b'{"id":"batch_req_1","line":')
    batch(source, out, target=str(model), method="suffix")
    assert records(out)[: len(before)] == before and len(records(out)) == len(prompts)
    choices = {
        record["custom_id"]: record["response"]["body"]["choices"][0] for record in records(out)
    }
    for prompt, completion in zip(
        prompts, load(model, method="ar").generate(prompts, max_new_tokens=160), strict=True
    ):
        assert (choices[prompt]["text"], choices[prompt]["finish_reason"]) == (
            completion.text,
            completion.finish_reason,
        )
    assert json.loads((out / "summary.json").read_text())["last_run"]["answered"] == len(
        prompts
    ) - len(before)


def test_inputs_and_folders_that_are_refused(tmp_path: Path) -> None:
    save_lines(tmp_path / "empty.jsonl", ["", "  "])
    for name, message in (
        ("nothing.jsonl", r"cannot read .*nothing\.jsonl: No such file"),
        (".", "Is a directory"),
        ("empty.jsonl", "has no lines"),
    ):
        refuses(message, scan, tmp_path / name)
    source = scan(save_lines(tmp_path / "in.jsonl", [{"prompt": "a"}] * 3))
    out = tmp_path / "out"
    job = {"seed": 1}
    refuses("is a file; the output goes into a folder", Folder, source.path, source, job)
    refuses("is not empty, and has no job", Folder, tmp_path, source, job)
    folder = Folder(out, source, job)
    folder.refuse(BadLine(2, None, "code", "why"))
    refuses("another process is working on this job", Folder, out, source, job)
    folder.close()
    path = out / "records.jsonl"
    record = path.read_bytes()
    path.write_bytes(record + b"\0\0\n" + record.replace(b'"line":2', b'"line":3'))
    refuses(r"records\.jsonl is damaged in line 2: remove that line", Folder, out, source, job)
    path.write_bytes(record + record)  # a line that is there twice, at the end
    again = Folder(out, source, job)
    assert again.done == {2} and path.read_bytes() == record
    again.close()
    known = json.loads((out / "job.json").read_text())
    for damaged in ({}, known | {"settings": 5}):
        (out / "job.json").write_text(json.dumps(damaged))
        refuses(r"job\.json is damaged", Folder, out, source, job)


def test_mistakes_are_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, message in (
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"target": "./nothing"}, "no model folder './nothing' for the target"),
        ({}, r"forerun batch needs fastapi: pip install '\.\[serve\]'"),
    ):
        if not options:
            monkeypatch.setattr(
                "forerun.cli.options.find_spec", lambda name: None if name == "fastapi" else name
            )
        refuses(
            message, batch, save_lines(tmp_path / "in.jsonl", ["x"]), tmp_path / "out", **options
        )
        assert not (tmp_path / "out").exists()
