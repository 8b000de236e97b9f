"""Error responses: ``Status`` objects with the wording of a real API server."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.loopback.kubernetes.kinds import Kind

Object = dict[str, Any]
MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"
_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    503: "ServiceUnavailable",
}


class Cause(NamedTuple):
    """One invalid field."""

    field: str
    message: str


class ApiError(Exception):
    """A request that fails with a ``Status``."""

    def __init__(
        self, code: int, message: str, details: Object | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.message = code, message
        self.details, self.retry_after_s = details, retry_after_s

    def body(self) -> Object:
        """The ``Status``; like a plain Go error, one with the code 500 has no reason."""
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": self.message, "code": self.code}
        reason = {"reason": _REASONS[self.code]} if self.code in _REASONS else {}
        return status | reason | ({"details": self.details} if self.details else {})


def bad_request(message: str) -> ApiError:
    return ApiError(400, message)


def no_such_path() -> ApiError:
    return ApiError(404, "the server could not find the requested resource")


def method_not_allowed() -> ApiError:
    return ApiError(405, "the server does not allow this method on the requested resource")


def not_found(kind: Kind, name: str) -> ApiError:
    return ApiError(404, f'{kind.resource} "{name}" not found')


def already_exists(kind: Kind, name: str) -> ApiError:
    return ApiError(409, f'{kind.resource} "{name}" already exists')


def conflict(kind: Kind, name: str) -> ApiError:
    return ApiError(409, f'Operation cannot be fulfilled on {kind.resource} "{name}": {MODIFIED}')


def invalid(kind: Kind, name: str, causes: Sequence[Cause]) -> ApiError:
    faults = [f"{cause.field}: {cause.message}" for cause in causes]
    subject = f"{kind.name}.{kind.group}" if kind.group else kind.name
    return ApiError(
        422, f'{subject} "{name}" is invalid: {faults[0] if len(faults) == 1 else "[" + ", ".join(faults) + "]"}'
    )


def forbidden(kind: Kind, name: str, reason: str) -> ApiError:
    subject = f'{kind.resource} "{name}"' if name else kind.resource
    return ApiError(403, f"{subject} is forbidden: {reason}")


def unavailable(reason: str) -> ApiError:
    return ApiError(503, reason)
