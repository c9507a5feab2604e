"""HTTP to a server with OpenAI's API: requests, streams of events, and what goes wrong, one plain line each.

Python's own HTTP is all that this takes: no package that forerun needs brings a client along in all its versions.
"""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from forerun import __version__

PATIENCE = 600.0  # seconds without a byte; OpenAI's clients wait as long
LONGEST = 300  # characters of what a server says, in an error
MOST = 2**24  # bytes of a line or a body


class BrokenError(ValueError):
    """A stream that ended before the answer did. What came before is the user's."""


class _UnknownError(ValueError):
    """Status 404."""


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: a key must not go elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Wire:
    """One server.

    Attributes:
        url: where its API is: what the user gave, with /v1 where that has no path.
    """

    def __init__(self, url: str, key: str | None) -> None:
        """Raises ValueError for what is no address, and for a key that no header can hold."""
        self.url = _address(url)
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
            raise ValueError("the API key must be printable ASCII without spaces around it")
        self._headers = {"User-Agent": f"forerun/{__version__}"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._has_key = bool(key)
        host = urlsplit(self.url).hostname or ""
        is_here = host in ("localhost", "::1") or host.startswith("127.")
        proxies = [urllib.request.ProxyHandler({})] if is_here else []  # no proxy stands before one's own machine
        self._opener = urllib.request.build_opener(_Stay, *proxies)

    def get(self, path: str) -> Any:
        """The JSON behind a path; None where the server does not know it. Raises ValueError."""
        try:
            with self._open(path, None, "application/json") as response:
                return json.loads(response.read(MOST))
        except _UnknownError:
            return None
        except (HTTPException, OSError, ValueError) as error:
            if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError):
                raise ValueError(f"{self.url} is no server with OpenAI's API: {path} gives no JSON") from None
            raise self._no_answer(error) from None

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The objects of a stream of server-sent events, up to [DONE]. Closing it closes the connection.

        Raises ValueError where there is no answer, BrokenError where it ended with an error or without [DONE].
        """
        try:
            response = self._open(path, json.dumps(body).encode(), "text/event-stream")
        except (HTTPException, OSError) as error:
            raise self._no_answer(error) from None
        with response:
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                raise ValueError(f"{self.url} is no server with OpenAI's API: it answers with {plain(kind)}")
            while line := self._line(response):
                if not line.startswith("data:"):
                    continue  # comments keep the connection alive
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                yield _event(data)
            raise BrokenError("the connection ended before the answer did")

    def _line(self, response: HTTPResponse) -> str:
        """A line with its end; empty at the end of the stream."""
        try:
            return response.readline(MOST).decode("utf-8", "replace")
        except HTTPException:  # in the middle of what was announced
            return ""
        except (OSError, ValueError) as error:
            raise BrokenError(f"the connection broke before the answer ended: {_reason(error)}") from None

    def _open(self, path: str, body: bytes | None, wanted: str) -> HTTPResponse:
        """An answer with status 200. Raises ValueError for others, and errors of urllib."""
        headers = self._headers | {"Accept": wanted} | ({"Content-Type": "application/json"} if body else {})
        request = urllib.request.Request(f"{self.url}/{path}", body, headers)
        try:
            response: HTTPResponse = self._opener.open(request, timeout=PATIENCE)
        except HTTPError as error:
            with error:
                raise self._refusal(error) from None
        return response

    def _refusal(self, error: HTTPError) -> ValueError:
        """What another status than 200 says."""
        says = _complaint(error)
        if error.code in (401, 403):
            wants = "refuses this API key" if self._has_key else "wants an API key: give --api-key or FORERUN_API_KEY"
            return ValueError(f"{self.url} {wants} ({error.code}: {says})")
        if error.code == 404:
            return _UnknownError(f"{self.url} has no such model or no such API (404: {says})")
        if 300 <= error.code < 400:
            return ValueError(f"{self.url} is elsewhere: {plain(error.headers.get('Location') or says)}")
        after = plain(error.headers.get("Retry-After") or "")
        if error.code in (429, 503):
            again = f"; try again in {after} s" if after.isdigit() else "; try again later"
            return ValueError(f"the server cannot answer now ({error.code}): {says}{again}")
        verb = "refuses this" if error.code < 500 else "failed"
        return ValueError(f"the server {verb} ({error.code}): {says}")

    def _no_answer(self, error: Exception) -> ValueError:
        if isinstance(error, ValueError):
            return error
        if isinstance(error, HTTPException) and not isinstance(error, ConnectionError):
            return ValueError(f"{self.url} is no HTTP server: {_reason(error)}")
        return ValueError(f"no server answers at {self.url}: {_reason(error)}")


def plain(text: str) -> str:
    """What came from elsewhere, as one bounded line that cannot steer a terminal."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text[: 4 * LONGEST]).split())
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."


def _address(url: str) -> str:
    wrong = ValueError(f"--url takes an address as http://127.0.0.1:8000, not '{plain(url)}'")
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not url.isascii():
        raise wrong
    if parts.query or parts.fragment or not url.isprintable() or " " in url:
        raise wrong
    if parts.username is not None or parts.password is not None:
        raise ValueError("--url takes no user and password; a key goes into --api-key")
    path = parts.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"


def _complaint(error: HTTPError) -> str:
    """What the body of an error says; its reason where that says nothing to people."""
    try:
        text = error.read(MOST).decode("utf-8", "replace")
    except (HTTPException, OSError):
        text = ""
    try:
        found = json.loads(text)
        found = found.get("error", found)
        message, param = (found.get(each) for each in ("message", "param"))
        if isinstance(message, str):
            return plain(message) + (f" ({plain(param)})" if isinstance(param, str) and param not in message else "")
    except (ValueError, AttributeError, RecursionError):
        pass
    return plain("" if text.lstrip().startswith("<") else text) or plain(str(error.reason)) or "no reason given"


def _event(data: str) -> dict[str, Any]:
    """Raises BrokenError for an error, and for what is no event."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BrokenError(f"the server sent what is no event of an answer: {plain(data)[:60]!r}")
    error = found.get("error")
    if error:
        message = error.get("message") if isinstance(error, dict) else error
        raise BrokenError(f"the server gave the answer up: {plain(str(message))}")
    return found


def _reason(error: BaseException) -> str:
    """Why there is no connection, or no more of it."""
    if isinstance(error, URLError) and isinstance(error.reason, BaseException):
        error = error.reason
    if isinstance(error, TimeoutError | socket.timeout):
        return f"nothing came for {PATIENCE:.0f} s"
    text = getattr(error, "strerror", None) or str(error)
    return plain(str(text)) or type(error).__name__
