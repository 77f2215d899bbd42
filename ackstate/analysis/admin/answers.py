"""Refusals of the server: a status and Pulsar's ``{"reason": ...}``, never a traceback."""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING, Any, final

from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response
from starlette.routing import Match

from ackstate.analysis.wording import printable
from ackstate.errors import (
    AckStateError,
    CorruptStateError,
    InvalidPositionError,
    RescheduleRefusedError,
    UnsupportedVersionError,
)
from ackstate.limits import DelayPolicyRefusedError, DeliveryDelayExceededError
from ackstate.limits.policies import POLICIES_OF
from ackstate.stores.base import LedgerNotFoundError, StoreError, VersionMismatchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastapi import FastAPI, Request


_REASON_LENGTH_MAX = 500
_WAY_OUT = "; DELETE one of its policies with If-Match: * to remove them all unread"

# Written by hand: a model would be built again for each status of each route.
REFUSAL_SCHEMA = {
    "title": "Refusal",
    "type": "object",
    "required": ["reason"],
    "properties": {"reason": {"type": "string", "description": "The reason, for people."}},
}
_CONTENT = {"application/json": {"schema": {"$ref": "#/components/schemas/Refusal"}}}
_MEANINGS = {
    400: "The request is malformed; the reason names the field, if known",
    401: "The bearer token is missing or wrong",
    403: "The server has no token, and the connection does not come from this machine",
    404: "The resource does not exist",
    409: "Another client wrote at the same time; nothing was changed, read again and retry",
    412: "The values or a name are invalid, or the policies do not match If-Match",
    413: "The body is too large",
    415: "The body is not declared as application/json",
    500: "The store has data that this release cannot read, or the server has a bug; see its log",
    503: "The store does not answer",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe refusals for the OpenAPI document, including those that any request may get."""
    described = (400, 401, 403, *statuses, 500, 503)
    return {status: {"description": _MEANINGS[status], "content": _CONTENT} for status in described}


def refusal(status: int, reason: object, *, headers: Mapping[str, str] | None = None) -> Response:
    """Return a refusal of one bounded line, in ASCII, because text from a client need not be encodable."""
    line = " ".join(str(reason).split())[:_REASON_LENGTH_MAX]
    content = json.dumps({"reason": line}).encode("ascii")
    return Response(content, status, media_type="application/json", headers=dict(headers) if headers else None)


def add_refusals(app: FastAPI) -> None:
    """Make an app answer every error with a refusal."""
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(StarletteHTTPException, _http)
    app.add_exception_handler(AckStateError, _refused)
    app.add_exception_handler(Exception, _unexpected)


def invalid(error: ValueError | TypeError) -> HTTPException:
    """Return the exception for an invalid value or name, with Pulsar's status."""
    return HTTPException(412, str(error))


def _malformed(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = error.errors()
    # An unknown policy is an unknown path.
    status = 404 if any(tuple(each["loc"]) == ("path", "policy") for each in problems) else 400
    return refusal(status, "; ".join(f"{_place(each['loc'])}: {each['msg']}" for each in problems[:5]))


def _place(location: Sequence[int | str]) -> str:
    """Return the name of a field from its path."""
    return ".".join(
        str(step) if isinstance(step, int) or step.isidentifier() else ascii(step[:60]) for step in location
    )


def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    headers = error.headers
    if error.status_code == 405:
        # Starlette lists only the methods of the first matching route, but here each method has its own route.
        headers = {"Allow": ", ".join(sorted(_methods_of_path(request)))}
    return refusal(error.status_code, error.detail, headers=headers)


def _methods_of_path(request: Request) -> set[str]:
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    # The paths of number policies end in a parameter; a fixed route that matches has precedence.
    return set(routes[0].methods).union(*(route.methods for route in routes if route.path == routes[0].path))


def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, DelayPolicyRefusedError | DeliveryDelayExceededError | RescheduleRefusedError):
        return refusal(412, error)
    if isinstance(error, InvalidPositionError | LedgerNotFoundError):
        return refusal(404, error)
    if isinstance(error, VersionMismatchError):
        return refusal(409, f"changed by another client at the same time: {error}")
    LOG.error("%s: %s", type(error).__name__, error)
    if isinstance(error, CorruptStateError | UnsupportedVersionError):
        return refusal(500, _with_way_out(str(error)))
    if isinstance(error, StoreError):
        return refusal(503, f"the store does not answer: {error}")
    return refusal(500, f"{request.method} failed; see the server's log")


def _with_way_out(text: str) -> str:
    if not text.startswith(POLICIES_OF):
        return text
    return f"{text[: _REASON_LENGTH_MAX - len(_WAY_OUT)]}{_WAY_OUT}"


def _unexpected(request: Request, error: Exception) -> Response:
    # The server logs the traceback: Starlette raises the error once more after this answer.
    return refusal(500, f"{request.method} failed with {type(error).__name__}; see the server's log")


LOG = logging.getLogger("ackstate.admin")


def log_to_stderr() -> None:
    """Write the server's log to standard error, including errors, but no warnings, of its libraries.

    Clients could cause any number of uvicorn's warnings.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(name)s %(levelname)s %(message)s"))
    for logger, level in ((LOG, logging.INFO), (logging.getLogger("uvicorn.error"), logging.ERROR)):
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)


@final
class _OneLine(logging.Formatter):
    """Escapes characters that could split a message or change its display; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - overrides
        """Return the line of a record."""
        return printable(super().formatMessage(record))
