"""HTTP below the app: bytes of clients and proxies that a library would not send."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from tests.support.serving import PLAIN, Live, get, held, live, make_decoder, served, until

server = served(make_decoder)
BODY = {"prompt": "the cat", "max_tokens": 5, "temperature": 0}


def request(body: dict[str, Any], *headers: str) -> bytes:
    content = json.dumps(body)
    lines = [f"POST {PLAIN} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(content)}", *headers]
    return ("\r\n".join([*lines, "", content])).encode()


def connected(server: Live) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    connection.settimeout(60)
    return connection


def rest(connection: socket.socket) -> str:
    """What comes until the server closes the connection."""
    parts = []
    while part := connection.recv(2**16):
        parts.append(part)
    return b"".join(parts).decode()


def answer(server: Live, *parts: bytes) -> tuple[str, Any]:
    """The status line and the JSON of the only response, after which the connection is closed."""
    with connected(server) as connection:
        connection.sendall(b"".join(parts))
        text = rest(connection)
    assert text.count("HTTP/1.1 ") == 1
    head, _, body = text.partition("\r\n\r\n")
    return head.partition("\r\n")[0], json.loads(body)


def test_a_body_of_two_lengths_is_refused_with_all_behind_it(server: Live) -> None:
    """A proxy may have taken the second request for a part of the first one's body."""
    head = request(BODY, "Transfer-Encoding: chunked").partition(b"\r\n\r\n")[0]
    smuggled = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    status, found = answer(server, head, b"\r\n\r\n0\r\n\r\n", smuggled)
    assert status == "HTTP/1.1 400 Bad Request"
    assert found["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    "data",
    [
        b"what is this\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # without a host
        b"GET /health HTTP/1.1\r\nHost: a\r\nbroken header\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /health HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    ],
)
def test_what_is_not_http_gets_an_error_that_clients_can_read(server: Live, data: bytes) -> None:
    status, found = answer(server, data)
    assert status == "HTTP/1.1 400 Bad Request"
    assert sorted(found["error"]) == ["code", "message", "param", "type"]


def test_a_whole_url_is_a_path_and_a_host(server: Live) -> None:
    close = b"Host: localhost\r\nConnection: close\r\n\r\n"
    for target in (b"http://127.0.0.1:1/version?a", b"HTTPS://box/version"):
        status, body = answer(server, b"GET " + target + b" HTTP/1.1\r\n" + close)
        assert status == "HTTP/1.1 200 OK" and list(body) == ["version"]
    status, body = answer(server, b"GET http://a.example/version HTTP/1.1\r\n" + close)
    assert status == "HTTP/1.1 403 Forbidden" and "'a.example'" in body["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_who_has_said_all_gets_the_answer(server: Live, stream: bool) -> None:
    with connected(server) as connection:
        with held(server.worker.engine) as go:
            connection.sendall(request(BODY | {"stream": stream}))
            connection.shutdown(socket.SHUT_WR)
            until(lambda: server.service.open == 1)
            go.set()
        text = rest(connection)
    assert '"finish_reason":"length"' in text
    assert text.startswith("HTTP/1.1 102 Processing\r\n\r\n") or stream
    assert text.count("HTTP/1.1 200 OK") == 1


@pytest.mark.parametrize("sent", [1.0, 0.9])
def test_who_has_said_all_gets_an_answer_to_each_whole_request(server: Live, sent: float) -> None:
    """Of the second request, `sent` is the share that comes."""
    second = request(BODY | {"n": 2, "stream": True})
    with connected(server) as connection:
        with held(server.worker.engine) as go:
            connection.sendall(request(BODY) + second[: int(sent * len(second))])
            connection.shutdown(socket.SHUT_WR)
            until(lambda: server.service.open == 1)
            go.set()
        text = rest(connection)
    whole = 2 if sent == 1 else 1
    assert text.count("HTTP/1.1 200 OK") == whole
    assert text.count('"finish_reason":"length"') == (3 if whole == 2 else 1)
    assert text.endswith("data: [DONE]\n\n\r\n0\r\n\r\n" if whole == 2 else "}")
    until(lambda: server.service.open == 0)


def test_without_a_key_public_names_are_refused(server: Live) -> None:
    """A page may have its own name point to this machine, and ask under that name."""
    names = ["localhost:1", "[::1]:8000", "10.0.0.3", "box", "box.local:80", "a.internal"]
    assert {get(server, "/version", headers={"host": name}).status_code for name in names} == {200}
    for name in ("a.example", "127.0.0.1.a.example:8000", "A.EXAMPLE."):
        refused = get(server, "/version", headers={"host": name})
        assert refused.status_code == 403
        assert "--allowed-hosts" in refused.json()["error"]["message"]
    for settings in ({"allowed_hosts": ("a.example",)}, {"allowed_hosts": ("*",)}):
        with live(**settings) as other:
            for name in ("a.example", "A.EXAMPLE:80"):
                assert get(other, "/version", headers={"host": name}).status_code == 200
    with live(api_key="secret") as other:
        headers = {"host": "a.example", "authorization": "Bearer secret"}
        assert get(other, "/version", headers=headers).status_code == 200
