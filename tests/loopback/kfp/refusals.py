"""Error responses of the API server: a gRPC status and the HTTP status that its gateway derives from it."""

HTTP = {3: 400, 5: 404, 6: 409, 7: 403, 9: 400, 10: 409, 13: 500, 14: 503, 16: 401}


class Refused(Exception):
    """The API server rejects a request with a gRPC status other than OK."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def invalid(message: str) -> Refused:
    return Refused(3, message)


def missing(kind: str, name: str) -> Refused:
    return Refused(5, f"{kind} {name} not found")


def exists(message: str) -> Refused:
    return Refused(6, message)


def forbidden(message: str) -> Refused:
    return Refused(7, message)
