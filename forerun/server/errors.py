"""Errors with short messages, in the shape that a client reads.

That is OpenAI's, unless the path belongs to another API.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from forerun.sampling.grammar import FormError

MAX_MESSAGE = 300  # characters
OLLAMA_PATH = "/api/"  # where paths of Ollama's API begin
MESSAGES_PATH = "/v1/messages"  # where paths of Anthropic's API begin

_TYPES = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
}
# OpenAI's clients retry every error of 500 and above twice. They are told not to after 500 and 504,
# because the same request would fail again.
_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    500: {"x-should-retry": "false"},
    503: {"Retry-After": "5"},
    504: {"x-should-retry": "false"},
}
# Anthropic's names of errors, beside invalid_request_error and api_error.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error that a client receives in place of an answer."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = bounded(message)
        self.param = param
        self.code = code or _CODES.get(status)
        self.type = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the JSON object that describes the error to clients of a path."""
        if path.startswith(OLLAMA_PATH):
            return {"error": self._named_message()}
        if path.startswith(MESSAGES_PATH):
            return self._anthropic_body()
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def _named_message(self) -> str:
        """Return the message with the name of the field, for clients that get nothing else."""
        if self.param is None or self.param in self.message:
            return self.message
        return bounded(f"{self.param}: {self.message}")

    def _anthropic_body(self) -> dict[str, Any]:
        """Return the error in Anthropic's shape, whose only place for a field is the message."""
        kind = _ANTHROPIC_TYPES.get(self.status)
        if kind is None:
            kind = "api_error" if self.status >= 500 else "invalid_request_error"
        return {"type": "error", "error": {"type": kind, "message": self._named_message()}}

    def response(self, path: str, **headers: str) -> Response:
        """Return the error as a response to a request of a path.

        It has the headers of its status and those given.
        """
        return JSONResponse(self.body(path), self.status, _HEADERS.get(self.status, {}) | headers)


def loading() -> ApiError:
    """Return the error for requests that arrive before the model is loaded."""
    return ApiError(503, "the model is being loaded", code="loading")


def queue_full() -> ApiError:
    """Return the error for requests that would wait behind too many others."""
    return ApiError(503, "the queue is full; try again later", code="queue_full")


def shutting_down() -> ApiError:
    """Return the error for requests that the server can no longer answer."""
    return ApiError(503, "the server is shutting down", code="shutting_down")


def timed_out() -> ApiError:
    """Return the error for answers that exceed the time limit."""
    return ApiError(504, "the answer took too long", code="timeout")


def to_api_error(error: BaseException) -> ApiError:
    """Return the error that a client receives when a step of its request has failed."""
    if isinstance(error, FormError):
        return ApiError(400, str(error), "response_format")
    return ApiError(500, f"decoding failed: {type(error).__name__}", code="decoding")


def bounded(text: str) -> str:
    """Return a text as one line of at most `MAX_MESSAGE` characters that UTF-8 can encode."""
    line = " ".join(text[: 4 * MAX_MESSAGE].split()).encode("utf-8", "replace").decode()
    if len(line) <= MAX_MESSAGE:
        return line
    return line[: MAX_MESSAGE - 3] + "..."


@contextmanager
def blame(param: str | None) -> Iterator[None]:
    """Turn a ValueError into an ApiError of status 400 that names a field of the request."""
    try:
        yield
    except ValueError as error:
        raise ApiError(400, str(error), param) from None


def _validation_error(error: RequestValidationError) -> ApiError:
    """Describe the first mistake that pydantic found, without the input, which it would echo."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", "body", "invalid_json")
    # The location is "body" and then names and list indices; a param consists of names only.
    names = [str(part)[:40] for part in first["loc"][1:4] if not isinstance(part, int)]
    param = ".".join(names) or "body"
    message = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}", param)


def add_handlers(app: FastAPI) -> None:
    """Give all errors of an app the same shape. Status 422 becomes 400."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response(request.url.path)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _validation_error(error).response(request.url.path)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        param = "body" if error.status_code == 400 else None
        failure = ApiError(error.status_code, str(error.detail), param)
        return failure.response(request.url.path, **error.headers or {})

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        # The connection is closed, as uvicorn closes it after an exception.
        failure = ApiError(500, "the server failed; its log has the reason")
        return failure.response(request.url.path, Connection="close")
