"""Error responses of the API server: a gRPC status and the HTTP status that its gateway derives
from it."""

HTTP = {3: 400, 5: 404, 6: 409, 7: 403, 9: 400, 10: 409, 13: 500, 14: 503, 16: 401}


class ApiServerError(Exception):
    """The API server rejects a request with a gRPC status other than OK."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def invalid(message: str) -> ApiServerError:
    return ApiServerError(3, message)


def missing(kind: str, name: str) -> ApiServerError:
    return ApiServerError(5, f"{kind} {name} not found")


def exists(message: str) -> ApiServerError:
    return ApiServerError(6, message)


def forbidden(message: str) -> ApiServerError:
    return ApiServerError(7, message)
