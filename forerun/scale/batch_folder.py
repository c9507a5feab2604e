"""The output of a batch job: a file that only grows, so that a job which was killed goes on where it was."""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from forerun.files import write_text
from forerun.scale.batch_file import BadLine, Input, Line

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

    A record is in records.jsonl when `answer` or `refuse` returns, so killing the process loses none. At most the last
    one is torn, if the process or the disk ends within it; the next run cuts it off. Lines that failed have none, and
    are asked again by the next run. All methods raise ValueError if the disk takes no more.

    Attributes:
        done: numbers of the lines that have a record; failed: of those that failed in this run.
        sums: of all records, by SUMS; before: as they were when this run began.
    """

    def __init__(self, path: Path, source: Input, settings: dict[str, Any]) -> None:
        """Raises ValueError if the folder belongs to another input, other settings or no job at all, if another process
        writes to it, and if its records are damaged."""
        self.path, self._source = path, source
        self._job = json.loads(json.dumps({"input": source.fingerprint, "settings": settings}))
        self.done: set[int] = set()
        self.failed: set[int] = set()
        self.sums = Counter[str]()
        self._file: BinaryIO | None = None
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
        if (path / "records.jsonl").exists():
            with self._writing():
                self._read(path / "records.jsonl")
        self.before = self.sums.copy()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ValueError(f"cannot write to {self.path}: {error.strerror}") from None

    def _check(self) -> None:
        known = self.path / "job.json"
        if not known.exists():
            if self.path.exists() and not all(
                each.name.startswith((".lock", "job.json")) for each in self.path.iterdir()
            ):
                raise ValueError(
                    f"{self.path} is not empty, and has no job of forerun batch: give another folder"
                )
            return
        try:
            found = json.loads(known.read_bytes())
            then, now = found["settings"], self._job["settings"]
            is_same = found["input"] == self._job["input"]
        except (OSError, ValueError, TypeError, KeyError):
            raise ValueError(f"{known} is damaged: give another folder") from None
        if not is_same:
            raise ValueError(
                f"{self.path} belongs to another input than {self._source.path}: give another folder"
            )
        for name in sorted(then.keys() | now.keys()):
            one, other = (json.dumps(each.get(name)) for each in (then, now))
            if one != other:
                raise ValueError(
                    f"{self.path} belongs to a job with {name} {one}, not {other}: give another folder"
                )

    def _read(self, path: Path) -> None:
        """Count the records of earlier runs, and cut off the last one if it is torn."""
        whole = 0
        with path.open("r+b") as file:
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
                        raise ValueError(
                            f"{path} is damaged in line {count}: take that line out"
                        ) from None
                    file.truncate(whole)
                    break
                self.done.add(number)
                whole += len(raw)

    @property
    def ended(self) -> bool:
        """Whether every line has its record, or has failed."""
        return len(self.done) + len(self.failed) == len(self._source.numbers)

    def answer(self, line: Line, status: int, request_id: str, body: bytes) -> None:
        """Keep the server's answer to a line, JSON without a line end. From status 500 on the line has failed."""
        if status >= 500:
            self.failed.add(line.number)
            self.sums["failed"] += 1
            return
        response = b'{"status_code":%d,"request_id":%s,"body":%s}' % (
            status,
            json.dumps(request_id).encode(),
            body,
        )
        self._append(line, response, None)

    def refuse(self, line: BadLine) -> None:
        """Keep what is wrong with a line."""
        error = {
            "code": line.code,
            "message": f"line {line.number}: {line.message}",
            "line": line.number,
        }
        self._append(line, b"null", error)

    def _append(self, line: Line | BadLine, response: bytes, error: dict[str, Any] | None) -> None:
        id = f"batch_req_{self._source.fingerprint[:12]}_{line.number}"
        head = {"id": id, "line": line.number, "custom_id": line.custom_id}
        first, last = (json.dumps(each, separators=(",", ":")).encode() for each in (head, error))
        record = b'%s,"response":%s,"error":%s}\n' % (first[:-1], response, last)
        with self._writing():
            if self._file is None:
                if not (self.path / "job.json").exists():
                    write_text(self.path / "job.json", json.dumps(self._job, indent=1) + "\n")
                self._file = (self.path / "records.jsonl").open("ab")
            self._file.write(record)
            self._file.flush()
        self.done.add(line.number)
        self.sums += sums_of(json.loads(record))

    def close(self) -> None:
        """Unlock the folder, whatever the disk says."""
        with self._lock, self._writing():
            if self._file is not None:
                self._file.close()

    def summarise(self, seconds: float) -> dict[str, Any]:
        """Write summary.json of a job that has ended, and return it. `seconds`: of this run."""
        new = {
            name: self.sums[name] - self.before[name] for name in ("answered", "completion_tokens")
        }
        run = {"seconds": round(seconds, 3), **new}
        found: dict[str, Any] = {
            "lines": len(self._source.numbers),
            **{name: self.sums[name] for name in SUMS},
        }
        found |= {
            "tau": round(self.sums["completion_tokens"] / max(1, self.sums["steps"]), 4),
            "last_run": run,
        }
        with self._writing():
            write_text(self.path / "summary.json", json.dumps(found, indent=1) + "\n")
        return found
