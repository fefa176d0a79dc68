"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hotstart.frontend.protocol.requests import ErrorInfo, ErrorResponse

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """An answer other than success; ``param`` names the offending field."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def body(self) -> bytes:
        """OpenAI's error body as JSON."""
        kind = _TYPES.get(self.status, "APIError")
        info = ErrorInfo(message=self.message, type=kind, param=self.param, code=self.status)
        return msgspec.json.encode(ErrorResponse(info))

    def response(self) -> Response:
        """The whole HTTP answer."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(self.body(), self.status, headers, media_type="application/json")


async def answer_api_error(request: Request, error: Exception) -> Response:
    """Exception handler for :class:`ApiError`."""
    assert isinstance(error, ApiError)
    return error.response()


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler for the router's own errors: unknown routes and wrong methods."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    message = error.detail
    if error.status_code == 404:
        message = f"There is no {method} {path} here."
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{path} does not answer {method}; use {allowed}."
    response = ApiError(error.status_code, message).response()
    response.headers.update(error.headers or {})
    return response


async def answer_defect(request: Request, error: Exception) -> Response:
    """Exception handler for everything unforeseen; the server writes the traceback to its log."""
    return ApiError(500, "The server failed to answer; its log has the cause.").response()
