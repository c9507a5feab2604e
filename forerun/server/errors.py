"""Errors as OpenAI's clients read them, with short texts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from forerun.sampling.grammar import FormError

LONGEST = 300  # characters of a message

_TYPES = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
}
# OpenAI's clients try twice more; what gave 500 or 504 would go wrong again.
_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    500: {"x-should-retry": "false"},
    503: {"Retry-After": "5"},
    504: {"x-should-retry": "false"},
}


class ApiError(Exception):
    """An error that a client gets in place of an answer."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, bounded(message), param
        self.code = code or _CODES.get(status)
        self.type = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, **headers: str) -> Response:
        return JSONResponse(self.body(), self.status, _HEADERS.get(self.status, {}) | headers)


def loading() -> ApiError:
    return ApiError(503, "the model is being loaded", code="loading")


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")


def timed_out() -> ApiError:
    return ApiError(504, "the answer took too long", code="timeout")


def to_api_error(error: BaseException) -> ApiError:
    """Return what a client gets for an error of its request's steps."""
    if isinstance(error, FormError):
        return ApiError(400, str(error), "response_format")
    return ApiError(500, f"decoding failed: {type(error).__name__}", code="decoding")


def bounded(text: str) -> str:
    """Return one line of at most `LONGEST` characters that every encoding can hold."""
    line = " ".join(text[: 4 * LONGEST].split()).encode("utf-8", "replace").decode()
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."


@contextmanager
def blame(param: str | None) -> Iterator[None]:
    """Turn a ValueError into status 400 for a field of the request."""
    try:
        yield
    except ValueError as error:
        raise ApiError(400, str(error), param) from None


def add_handlers(app: FastAPI) -> None:
    """Give all errors the one shape. No response has status 422."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]  # told without the input that pydantic would echo
        if first["type"] == "json_invalid":
            return ApiError(400, "the body is not JSON", "body", "invalid_json").response()
        param = (
            ".".join(str(each)[:40] for each in first["loc"][1:4] if not isinstance(each, int))
            or "body"
        )
        return ApiError(
            400, f"{param}: {str(first['msg']).removeprefix('Value error, ')}", param
        ).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        param = "body" if error.status_code == 400 else None
        return ApiError(error.status_code, str(error.detail), param).response(**error.headers or {})

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return ApiError(500, "the server failed; its log says why").response(
            Connection="close"
        )  # as uvicorn does
