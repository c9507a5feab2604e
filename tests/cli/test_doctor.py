"""`forerun doctor`: what it finds, and what it advises."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.cli import doctor
from forerun.cli.doctor import Finding, collect_findings, unmet
from forerun.csrc.library import VARIABLE, variant
from forerun.zoo import MODELS
from forerun.zoo.cache import Entry
from tests.support.commands import run


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(doctor, "READ_BYTES", 2**16)
    return tmp_path / "home"


def findings_about(subject: str) -> list[Finding]:
    return [finding for finding in collect_findings() if finding.subject == subject]


def test_it_tells_what_runs_here(home: Path) -> None:
    done = run("doctor", env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    for text in (f"C for {variant()}", "threads", "GB/s", f"torch {torch.__version__}", str(home)):
        assert text in done.stdout
    assert "forerun fetch qwen-coder" in done.stdout and "\x1b" not in done.stdout
    assert done.stdout.endswith("forerun can run here.\n") and done.stderr == ""


def test_without_kernels_it_says_why_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("doctor", "--json", env=os.environ | {VARIABLE: "none", "OMP_NUM_THREADS": "1"})
    problems = [finding for finding in json.loads(done.stdout) if finding["is_problem"]]
    assert done.returncode == 1
    assert [(each["subject"], each["advice"]) for each in problems] == [
        ("kernels", f"unset {VARIABLE}")
    ]
    monkeypatch.setattr(doctor, "library", lambda: None)
    monkeypatch.setenv("CC", "no-such-compiler")
    (finding,) = findings_about("kernels")
    assert "there is no C compiler 'no-such-compiler': install one" in finding.advice
    monkeypatch.setenv("CC", "sh")
    assert findings_about("kernels")[0].advice.startswith("build them with")


def test_a_slower_instruction_set_than_the_best_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "variants", lambda: [str(variant()), "warp"])
    (finding,) = findings_about("kernels")
    assert finding.advice == f"unset {VARIABLE}: warp is faster" and not finding.is_problem


def test_threads_are_compared_with_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    for cores, physical, is_problem, advice in (
        (2, None, True, "set OMP_NUM_THREADS=2, or give --threads 2"),
        (4, None, False, ""),
        (8, None, False, "unset OMP_NUM_THREADS to use all 8 cores"),
        (16, 8, False, "unset OMP_NUM_THREADS to use all 8 cores"),
    ):
        monkeypatch.setattr(doctor, "usable_cores", lambda cores=cores: cores)
        monkeypatch.setattr(doctor, "physical_cores", lambda physical=physical: physical)
        (finding,) = findings_about("threads")
        assert finding.is_problem is is_problem and finding.advice.startswith(advice)


def test_a_thread_for_each_physical_core_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(doctor, "usable_cores", lambda: 8)
    monkeypatch.setattr(doctor, "physical_cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert findings_about("threads")[0].advice == ""


def test_memory_is_judged_by_the_largest_model(tmp_path: Path) -> None:
    kept = [Entry("smollm2", tmp_path, 10**8, True), Entry("qwen-coder", tmp_path, 10**9, True)]
    assert doctor._free_memory(3 * 10**9, kept).advice == ""
    finding = doctor._free_memory(2 * 10**9, kept)
    assert finding.is_problem and finding.advice.startswith("qwen-coder needs about 2.2 GB")
    assert doctor._free_memory(10**9, []).advice == ""


def test_a_folder_that_cannot_be_written_is_a_problem(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write_text("a file, not a folder")
    (finding,) = findings_about("cache")
    assert finding.is_problem and "FORERUN_HOME" in finding.advice


def test_a_download_that_was_stopped_is_told_once(home: Path) -> None:
    model = MODELS["smollm2"]
    partial = home / "models" / model.name / "downloads" / model.file
    partial.parent.mkdir(parents=True)
    with partial.open("wb") as file:
        file.truncate(model.size // 2)
    (finding, *_) = findings_about("")
    assert finding == Finding(
        "", "smollm2, 49 MB: 50% downloaded", "`forerun fetch smollm2` continues"
    )


def test_packages_that_are_too_old_or_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unmet() == []
    wanted = ["torch>=99", "no-such-package>=1", "numpy>=1", 'ray>=99; extra == "ray"']
    monkeypatch.setattr(doctor, "requires", lambda name: wanted)
    assert unmet() == ["torch>=99", "no-such-package>=1"]
    problems: list[Any] = [finding for finding in findings_about("versions") if finding.is_problem]
    assert problems[0].advice == "pip install 'torch>=99'"
