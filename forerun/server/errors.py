"""Errors as OpenAI's clients read them. Texts are short, whatever a request holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

LONGEST = 300  # characters of a message
RETRY = 5  # seconds, for Retry-After

_TYPES = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}
_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


class ApiError(Exception):
    """What a client is told in place of an answer."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, bounded(message), param
        self.code = code or _CODES.get(status)
        self.type = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {"Retry-After": str(RETRY)} if self.status == 503 else {}
        if self.status in (500, 504):  # it would go wrong again, and OpenAI's clients try twice more
            headers["x-should-retry"] = "false"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def too_late() -> ApiError:
    return ApiError(504, "the answer took too long", code="timeout")


def bounded(text: str) -> str:
    """One line of at most `LONGEST` characters, which any encoding can hold."""
    line = " ".join(text[: 4 * LONGEST].split()).encode("utf-8", "replace").decode()
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."


@contextmanager
def blamed(param: str | None) -> Iterator[None]:
    """Turns a ValueError into status 400 for a field of the request."""
    try:
        yield
    except ValueError as error:
        raise ApiError(400, str(error), param) from None


def add_handlers(app: FastAPI) -> None:
    """Everything that goes wrong gets the one shape; 422 is never said."""

    async def own(request: Request, error: Any) -> Response:
        return error.response()

    async def invalid(request: Request, error: Any) -> Response:
        return _from_pydantic(error).response()

    async def plain(request: Request, error: Any) -> Response:
        param = "body" if error.status_code == 400 else None
        response = ApiError(error.status_code, str(error.detail), param).response()
        response.headers.update(error.headers or {})
        return response

    async def broken(request: Request, error: Exception) -> Response:
        response = ApiError(500, "the server failed; its log says why").response()
        response.headers["Connection"] = "close"  # as uvicorn is about to do
        return response

    app.add_exception_handler(ApiError, own)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, plain)
    app.add_exception_handler(Exception, broken)


def _from_pydantic(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong, without the input that pydantic would echo."""
    first = error.errors()[0]
    where = [str(each)[:40] for each in first["loc"][1:4] if not isinstance(each, int)]
    param = ".".join(where) or "body"
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not JSON", "body", "invalid_json")
    return ApiError(400, f"{param}: {str(first['msg']).removeprefix('Value error, ')}", param)
