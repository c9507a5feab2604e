"""The output of a batch job: files that only grow, so that a job which was killed goes on where it was."""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO

from forerun.files import write_text
from forerun.scale.batch_file import BadLine, Input, Line

SYNC = 1.0  # seconds, at most, of records that a machine without power may lose


SUMS = ("answered", "refused", "bad_lines", "failed", "prompt_tokens", "completion_tokens", "steps")


def sums_of(record: dict[str, Any]) -> Counter[str]:
    """Return what a record adds to the sums. `steps`: forwards of the target, as its answer counts them."""
    response = record["response"]
    if response is None:
        return Counter(bad_lines=1)
    if response["status_code"] != 200:
        return Counter(refused=1)
    usage, metrics = response["body"]["usage"], response["body"]["metrics"]
    found = Counter(answered=1, steps=metrics["speculative_decoding"]["num_spec_steps"])
    return found + Counter({name: usage[name] for name in ("prompt_tokens", "completion_tokens")})


class Folder:
    """Records of a job, one for each line of its input. Only one process at a time can have it.

    What is final is in records.jsonl. A record is there when `answer` or `refuse` returns, so killing the process
    loses none. At most the last one is torn, if the process or the disk ends within it; the next run cuts it off. Lines
    that failed are in failed.jsonl, and are asked again by the next run. All methods raise ValueError if the disk takes
    no more.

    Attributes:
        done: numbers of the lines whose record is final; failed: of those that failed in this run.
        sums: of all records, by SUMS; tokens, records: output tokens and records of this run.
        on_record: called after each record.
    """

    def __init__(self, path: Path, source: Input, settings: dict[str, Any]) -> None:
        """Raises ValueError if the folder belongs to another input, other settings or no job at all, if another process
        writes to it, and if its records are damaged."""
        self.path, self._source = path, source
        size = len(source.numbers)
        self._job = json.loads(json.dumps({"input": source.fingerprint, "lines": size, "settings": settings}))
        self.done: set[int] = set()
        self.failed: set[int] = set()
        self.sums, self.tokens, self.records = Counter[str](), 0, 0
        self.on_record: Callable[[], None] = lambda: None
        self._records = path / "records.jsonl"
        self._file: BinaryIO | None = None
        self._synced = perf_counter()
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; the output goes into a folder")
        self._check()
        with self._writing():
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ValueError(f"another process is at this job: {path}") from None
        self._check()
        if self._records.exists():
            with self._writing():
                self._read()

    @property
    def ended(self) -> bool:
        """Whether every line has its record."""
        return len(self.done) + len(self.failed) == len(self._source.numbers)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ValueError(f"cannot write to {self.path}: {error.strerror}") from None

    def _check(self) -> None:
        """Raise ValueError unless the folder is this job's, or free."""
        known = self.path / "job.json"
        if not known.exists():
            ours = (".lock", "job.json.")
            if self.path.exists() and not all(each.name.startswith(ours) for each in self.path.iterdir()):
                raise ValueError(f"{self.path} is not empty, and has no job of forerun batch: give another folder")
            return
        try:
            found = json.loads(known.read_bytes())
            then, now = found["settings"], self._job["settings"]
            is_same = found["input"] == self._job["input"]
        except (OSError, ValueError, TypeError, KeyError):
            raise ValueError(f"{known} is damaged: give another folder") from None
        if not is_same:
            raise ValueError(f"{self.path} belongs to another input than {self._source.path}: give another folder")
        for name in sorted(then.keys() | now.keys()):
            one, other = (json.dumps(each.get(name)) for each in (then, now))
            if one != other:
                raise ValueError(f"{self.path} belongs to a job with {name} {one}, not {other}: give another folder")

    def _read(self) -> None:
        """Count the records of earlier runs, and cut off the last one if it is torn."""
        whole = 0
        with self._records.open("r+b") as file:
            for count, raw in enumerate(file, 1):
                try:
                    if not raw.endswith(b"\n"):
                        raise ValueError("torn")
                    record = json.loads(raw)
                    number = record["line"]
                    if number not in self._source.numbers or number in self.done:
                        raise ValueError("not of this job, or there twice")
                    self.sums += sums_of(record)
                except (ValueError, TypeError, KeyError):
                    if file.read(1):  # more comes after it, so it is not the end of a killed run
                        raise ValueError(f"{self._records} is damaged in line {count}: take that line out") from None
                    file.truncate(whole)
                    break
                self.done.add(number)
                whole += len(raw)

    # Writing.

    def answer(self, line: Line, status: int, request_id: str, body: bytes) -> None:
        """Keep the server's answer to a line, JSON without a line end. From status 500 on the line has failed."""
        if status >= 500:
            self.fail(line, json.loads(body)["error"]["message"])
            return
        response = b'{"status_code":%d,"request_id":%s,"body":%s}' % (status, json.dumps(request_id).encode(), body)
        self._append(self._record(line, response, None), line.number)

    def refuse(self, line: BadLine) -> None:
        """Keep what is wrong with a line."""
        self._append(self._record(line, b"null", (line.code, line.message)), line.number)

    def fail(self, line: Line, why: str) -> None:
        """Keep, until the job is run again, that a line got no answer."""
        assert line.number not in self.done and line.number not in self.failed
        with self._writing():
            self._begin()
            with (self.path / "failed.jsonl").open("ab") as file:
                file.write(self._record(line, b"null", ("failed", f"no answer: {why}")))
        self.failed.add(line.number)
        self._count(Counter(failed=1))

    def _record(self, line: Line | BadLine, response: bytes, why: tuple[str, str] | None) -> bytes:
        number, id = line.number, f"batch_req_{self._source.fingerprint[:12]}_{line.number}"
        head = {"id": id, "line": number, "custom_id": line.custom_id}
        error = why and {"code": why[0], "message": f"line {number}: {why[1]}", "line": number}
        first, last = (json.dumps(each, separators=(",", ":")).encode() for each in (head, error))
        return b'%s,"response":%s,"error":%s}\n' % (first[:-1], response, last)

    def _append(self, record: bytes, number: int) -> None:
        assert number not in self.done and number not in self.failed
        with self._writing():
            self._begin()
            if self._file is None:
                self._file = self._records.open("ab")
            self._file.write(record)
            self._file.flush()
            if perf_counter() - self._synced > SYNC:
                os.fsync(self._file.fileno())
                self._synced = perf_counter()
        self.done.add(number)
        self._count(sums_of(json.loads(record)))

    def _count(self, sums: Counter[str]) -> None:
        self.sums += sums
        self.tokens += sums["completion_tokens"]
        self.records += 1
        self.on_record()

    def _begin(self) -> None:
        """Before the first record of a run: mark the folder as the job's, and forget what failed before."""
        if self.records:
            return
        if not (self.path / "job.json").exists():
            write_text(self.path / "job.json", json.dumps(self._job, indent=1) + "\n")
        for name in ("failed.jsonl", "summary.json"):
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Unlock the folder, whatever the disk says."""
        file, self._file = self._file, None
        with self._lock, self._writing():
            if file is not None:
                with file:
                    os.fsync(file.fileno())

    def summarise(self, seconds: float) -> dict[str, Any]:
        """Write summary.json of a job that has ended, and return it. If this run had nothing to do, it stays as it is.

        `seconds`: of this run.
        """
        assert self.ended
        path = self.path / "summary.json"
        if not self.records and path.exists():
            return dict(json.loads(path.read_bytes()))
        run = {"records": self.records, "seconds": round(seconds, 3), "completion_tokens": self.tokens}
        run["tokens_per_second"] = round(self.tokens / seconds, 3) if seconds else 0.0
        found: dict[str, Any] = {"lines": len(self._source.numbers), **{name: self.sums[name] for name in SUMS}}
        found |= {"tau": round(self.sums["completion_tokens"] / max(1, self.sums["steps"]), 4), "last_run": run}
        with self._writing():
            write_text(path, json.dumps(found, indent=1) + "\n")
        return found
