"""The output of a batch job: a file that only grows, so that a killed job goes on where it was."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from forerun.files import take_lock, write_text
from forerun.scale.batch_file import BadLine, Input, Line

SUMS = ("answered", "refused", "bad_lines", "failed", "prompt_tokens", "completion_tokens", "steps")


def sums_of(record: dict[str, Any]) -> Counter[str]:
    """Return what a record adds to the sums; `steps` are the forwards of the target."""
    response = record["response"]
    if response is None:
        return Counter(bad_lines=1)
    if response["status_code"] != 200:
        return Counter(refused=1)
    usage = response["body"]["usage"]
    metrics = response["body"]["metrics"]
    sums = Counter(answered=1, steps=metrics["speculative_decoding"]["num_spec_steps"])
    return sums + Counter({name: usage[name] for name in ("prompt_tokens", "completion_tokens")})


def _compact_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class Folder:
    """The records of a job, one for each line of its input. Only one process can hold it.

    A record is in records.jsonl when `answer` or `refuse` returns, so killing the process loses
    none. At most the last one is torn, if the process or the disk fails while it is written; the
    next run cuts it off. Lines that failed have no record, and the next run asks them again. All
    methods raise ValueError if the disk cannot be written to, for example because it is full.

    Attributes:
        done: the numbers of the lines that have a record.
        failed: the numbers of the lines that failed in this run.
        sums: the sums over all records, by the names in SUMS.
        sums_before: the sums when this run began.
    """

    def __init__(self, path: Path, source: Input, settings: dict[str, Any]) -> None:
        """Open or make a folder, and lock it.

        Raises ValueError if the folder belongs to another input, to other settings or to no job at
        all, if another process holds it, and if its records are damaged.
        """
        self.path = path
        self._source = source
        job = {"input": source.fingerprint, "settings": settings}
        self._job = json.loads(json.dumps(job))  # as it is read back, for example with lists
        self.done: set[int] = set()
        self.failed: set[int] = set()
        self.sums = Counter[str]()
        self._file: BinaryIO | None = None
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; the output goes into a folder")
        self._check_job()
        with self._writing():
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("ab")
        if not self._has_lock():
            self._lock.close()
            raise ValueError(f"another process is working on this job: {path}")
        if (path / "records.jsonl").exists():
            with self._writing():
                self._read_records(path / "records.jsonl")
        self.sums_before = self.sums.copy()

    def _has_lock(self) -> bool:
        try:
            return take_lock(self._lock.fileno())
        except OSError:  # a file system without locks
            return False

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an OSError into a ValueError that names the folder."""
        try:
            yield
        except OSError as error:
            raise ValueError(f"cannot write to {self.path}: {error.strerror}") from None

    def _check_job(self) -> None:
        """Raise ValueError if the folder exists and is not that of this job."""
        path = self.path / "job.json"
        if not path.exists():
            self._check_empty()
            return
        try:
            known = json.loads(path.read_bytes())
            settings = dict(known["settings"])
            is_same_input = known["input"] == self._job["input"]
        except (OSError, ValueError, TypeError, KeyError):
            raise ValueError(f"{path} is damaged; choose another folder") from None
        if not is_same_input:
            raise ValueError(
                f"{self.path} belongs to a job with another input than {self._source.path}; choose "
                "another folder"
            )
        for name in sorted(settings.keys() | self._job["settings"].keys()):
            then = json.dumps(settings.get(name))
            now = json.dumps(self._job["settings"].get(name))
            if then != now:
                raise ValueError(
                    f"{self.path} belongs to a job with {name} {then}, not {now}; choose another "
                    "folder"
                )

    def _check_empty(self) -> None:
        """Raise ValueError if the folder has files, except those of a job that has just begun."""
        if not self.path.exists():
            return
        if not all(path.name.startswith((".lock", "job.json")) for path in self.path.iterdir()):
            raise ValueError(
                f"{self.path} is not empty, and has no job of forerun batch; choose another folder"
            )

    def _read_records(self, path: Path) -> None:
        """Count the records of earlier runs, and cut off the last one if it is torn."""
        size = 0  # bytes of the records that are whole
        with path.open("r+b") as file:
            for count, raw in enumerate(file, 1):
                try:
                    self._count_record(raw)
                except (ValueError, TypeError, KeyError):
                    if file.read(1):  # more follows, so this is not where a run was killed
                        raise ValueError(
                            f"{path} is damaged in line {count}: remove that line"
                        ) from None
                    file.truncate(size)
                    break
                size += len(raw)

    def _count_record(self, raw: bytes) -> None:
        if not raw.endswith(b"\n"):
            raise ValueError("torn")
        record = json.loads(raw)
        number = record["line"]
        if number not in self._source.numbers or number in self.done:
            raise ValueError("not of this job, or there twice")
        self.sums += sums_of(record)
        self.done.add(number)

    @property
    def ended(self) -> bool:
        """Whether every line has a record, or has failed."""
        return len(self.done) + len(self.failed) == len(self._source.numbers)

    def answer(self, line: Line, status: int, request_id: str, body: bytes) -> None:
        """Keep the server's answer to a line, which is JSON without a line end.

        With a status of 500 and above the line has failed, and no record is kept.
        """
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
        """Keep the reason why a line is not a request."""
        error = {
            "code": line.code,
            "message": f"line {line.number}: {line.message}",
            "line": line.number,
        }
        self._append(line, b"null", error)

    def _append(self, line: Line | BadLine, response: bytes, error: dict[str, Any] | None) -> None:
        id = f"batch_req_{self._source.fingerprint[:12]}_{line.number}"
        head = _compact_json({"id": id, "line": line.number, "custom_id": line.custom_id})
        record = b'%s,"response":%s,"error":%s}\n' % (head[:-1], response, _compact_json(error))
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
        """Unlock the folder, even if the disk cannot be written to."""
        with self._lock, self._writing():
            if self._file is not None:
                self._file.close()

    def summarise(self, seconds: float) -> dict[str, Any]:
        """Write summary.json of a job that has ended, and return it.

        `seconds` is the time of this run.
        """
        run: dict[str, Any] = {"seconds": round(seconds, 3)}
        for name in ("answered", "completion_tokens"):
            run[name] = self.sums[name] - self.sums_before[name]
        tau = self.sums["completion_tokens"] / max(1, self.sums["steps"])
        summary: dict[str, Any] = {
            "lines": len(self._source.numbers),
            **{name: self.sums[name] for name in SUMS},
            "tau": round(tau, 4),
            "last_run": run,
        }
        with self._writing():
            write_text(self.path / "summary.json", json.dumps(summary, indent=1) + "\n")
        return summary
