"""Error responses: ``Status`` objects with the wording of a real API server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.loopback.kubernetes.kinds import Kind

Object = dict[str, Any]


@dataclass(frozen=True)
class Cause:
    """One invalid field; ``reason`` is a ``CauseType`` of the API machinery, such as
    FieldValueInvalid."""

    field: str
    message: str
    reason: str = "FieldValueInvalid"


class ApiError(Exception):
    """A request that fails with a ``Status``."""

    def __init__(
        self, code: int, reason: str, message: str, details: Object | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message
        self.details, self.retry_after_s = details, retry_after_s

    def body(self) -> Object:
        """The ``Status``; like a plain Go error, an error without a reason omits it."""
        status: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "code": self.code,
        }
        details = dict(self.details or {})
        if self.retry_after_s is not None:
            details["retryAfterSeconds"] = self.retry_after_s
        return status | ({"reason": self.reason} if self.reason else {}) | ({"details": details} if details else {})


def success(kind: Kind, subject: Object) -> Object:
    """The ``Status`` of a completed deletion."""
    details = {"name": subject["metadata"]["name"], "kind": kind.plural, "uid": subject["metadata"]["uid"]}
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": details | ({"group": kind.group} if kind.group else {}),
    }


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def unauthorized() -> ApiError:
    return ApiError(401, "Unauthorized", "Unauthorized")


def no_such_path() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource", {})


def not_found(kind: Kind, name: str) -> ApiError:
    return ApiError(404, "NotFound", f'{kind.resource} "{name}" not found', _details(kind, name))


def method_not_allowed() -> ApiError:
    return ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource", {})


def already_exists(kind: Kind, name: str) -> ApiError:
    return ApiError(409, "AlreadyExists", f'{kind.resource} "{name}" already exists', _details(kind, name))


MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"


def conflict(kind: Kind, name: str, reason: str = MODIFIED) -> ApiError:
    message = f'Operation cannot be fulfilled on {kind.resource} "{name}": {reason}'
    return ApiError(409, "Conflict", message, _details(kind, name))


def expired(message: str) -> ApiError:
    return ApiError(410, "Expired", message)


def invalid(kind_name: str, group: str, name: str, causes: Sequence[Cause]) -> ApiError:
    faults = [f"{cause.field}: {cause.message}" for cause in causes]
    subject = f"{kind_name}.{group}" if group else kind_name
    message = f'{subject} "{name}" is invalid: {faults[0] if len(faults) == 1 else "[" + ", ".join(faults) + "]"}'
    details: Object = {"name": name, "group": group, "kind": kind_name, "causes": [vars(cause) for cause in causes]}
    return ApiError(422, "Invalid", message, {key: value for key, value in details.items() if value})


def forbidden(kind: Kind, name: str, reason: str) -> ApiError:
    subject = f'{kind.resource} "{name}"' if name else kind.resource
    return ApiError(403, "Forbidden", f"{subject} is forbidden: {reason}", _details(kind, name))


def denied(message: str) -> ApiError:
    """A request that a webhook refuses."""
    return ApiError(403, "Forbidden", message)


def too_many_requests(retry_after_s: int) -> ApiError:
    message = "the server has received too many requests and has asked us to try again later"
    return ApiError(429, "TooManyRequests", message, retry_after_s=retry_after_s)


def internal(reason: str) -> ApiError:
    return ApiError(500, "InternalError", f"Internal error occurred: {reason}", {"causes": [{"message": reason}]})


def unavailable(reason: str) -> ApiError:
    return ApiError(503, "ServiceUnavailable", reason)


def _details(kind: Kind, name: str) -> Object:
    details = {"name": name, "group": kind.group, "kind": kind.plural}
    return {key: value for key, value in details.items() if value}
