"""The error tree. Every message is one sentence that states what is wrong, where, and
how to fix it.

::

    EvernearError                        exit code 1
    ├── SettingsError                2   a setting is unknown or out of range
    ├── DataError                    3   images or labels are unusable, or a validation rule failed
    ├── IntegrityError               3   a hash, a stamp or a manifest does not match the content
    ├── StoreError                   4   the object store rejects a request, or has unexpected content
    │   ├── ConflictError                another writer was first (compare-and-swap failed)
    │   ├── MissingObjectError           an object does not exist
    │   ├── FormatError                  another version of evernear wrote an object
    │   └── TransientStoreError          the store is unreachable or overloaded; a retry may succeed
    ├── ServingError                 4   a server does not start, exited, or rejects a request
    │   ├── PredictionRejectedError  3   the server answered 4xx for this image
    │   ├── ServerUnreachableError       no server responds
    │   └── ServerTimeoutError           the server took longer than the client's timeout
    ├── BusyError                    4   another run uses the working directory, a deployment the Lease, a run the store
    ├── ClusterError                 4   Kubernetes is unreachable or rejects a request, or a rollout or a Job failed
    ├── PipelineServerError          4   Kubeflow Pipelines is unreachable or rejects a request
    ├── SlackError                   4   Slack is unreachable or rejects a request
    ├── TrainingError                6   training cannot continue (loss not finite, checkpoint of another run)
    └── UserInterruptError         130   Ctrl-C; the shell's convention is 128 + SIGINT
"""  # noqa: W505

import errno
from pathlib import Path
from typing import Literal


class EvernearError(Exception):
    """All errors that evernear raises deliberately. ``exit_code`` is the process's status."""

    exit_code = 1


class SettingsError(EvernearError):
    exit_code = 2


class DataError(EvernearError):
    exit_code = 3


class StoreError(EvernearError):
    """``is_denied``: these keys may not do this."""

    exit_code = 4

    def __init__(self, message: str, *, is_denied: bool = False) -> None:
        super().__init__(message)
        self.is_denied = is_denied


class ConflictError(StoreError):
    """A conditional write failed because the object changed after the writer read it."""


class MissingObjectError(StoreError):
    """An object does not exist in the store."""


class FormatError(StoreError):
    """Another version of evernear wrote a document of the store, which is neither damaged nor can
    be repaired."""


class TransientStoreError(StoreError):
    """The store is unreachable or overloaded. A write may have been executed."""


class IntegrityError(EvernearError):
    exit_code = 3


class TrainingError(EvernearError):
    exit_code = 6


class ServingError(EvernearError):
    exit_code = 4


class ServerUnreachableError(ServingError):
    """No server responds."""


class PredictionRejectedError(ServingError):
    """The server returned a 4xx status because the image or the request is invalid. If pixels have
    another preprocessing than the server's release, ``version`` is this release."""

    exit_code = 3

    def __init__(self, message: str, version: str = "") -> None:
        super().__init__(message)
        self.version = version


class ServerTimeoutError(ServingError):
    """The server did not respond within the client's timeout."""


class BusyError(EvernearError):
    """Another run uses the working directory, or another deployment holds the cluster's Lease."""

    exit_code = 4


class ClusterError(EvernearError):
    """``status`` is the API server's HTTP status: 404 for an absent object, 409 for a change by
    another writer, 503 if it is unreachable or overloaded, and 0 for all other errors."""

    exit_code = 4

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class PipelineServerError(EvernearError):
    """``status`` is the HTTP status of a rejection, 503 if the request was never sent, and
    otherwise 0: the request may have been executed."""

    exit_code = 4

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class SlackError(EvernearError):
    exit_code = 4

    def __init__(self, message: str, reason: Literal["", "unavailable", "not_writable"] = "") -> None:
        super().__init__(message)
        self.reason = reason


class UserInterruptError(EvernearError):
    """Ctrl-C. The message states what was stopped, what remains, and how to continue."""

    exit_code = 130


def disk_full_message(error: OSError, path: Path | str) -> str | None:
    """The message for a full disk or an exceeded quota or file size limit, otherwise None."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"The disk that holds {path} is full; free some space and run again."
    if error.errno == errno.EFBIG:
        return f"{path} would exceed the file size limit of this process (ulimit -f); raise the limit."
    # `tempfile` tests each candidate directory by writing a file. Its error omits the cause.
    if error.errno == errno.ENOENT and "No usable temporary directory" in str(error):
        return f"{error.strerror}: full or read-only; free some space, or name another one with TMPDIR."
    return None
