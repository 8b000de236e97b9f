"""What can go wrong, as a tree. Every message is one sentence: what is wrong, where, how to mend it.

::

    EvernearError                  exit code 1
    ├── SettingsError         2    a setting is unknown or out of its range
    ├── DataError             3    images or labels that cannot be used
    │   └── ValidationFailed       a validation rule of severity "error" fired
    ├── StoreError            4    the object store cannot be reached, refused, or holds something else
    │   ├── Conflict               somebody else wrote first (compare-and-swap lost)
    │   └── TransientStoreError    the store is unreachable or overloaded; the same request may succeed later
    ├── IntegrityError        5    a hash, a stamp or a manifest does not match what it describes
    ├── TrainingError         6    training cannot go on (loss not finite, checkpoint of another run)
    ├── ServingError          7    TorchServe does not start, died, or refused
    │   ├── PortTaken
    │   ├── Unreachable       8
    │   ├── PredictionRefused 9    the server answered 4xx for this image
    │   └── Timeout          11    the server took longer than the client waits
    ├── Busy                 10    another run holds the working directory, or another deployment the Lease
    ├── ClusterError         12    Kubernetes cannot be reached, refused, or the rollout did not come up
    ├── PipelineServerError  13    Kubeflow Pipelines cannot be reached or refused
    ├── SlackError           14    Slack cannot be reached or refused
    └── UserInterruptError  130    Ctrl-C, as of a shell: 128 + SIGINT
"""

import errno
from pathlib import Path


class EvernearError(Exception):
    """The root of all errors that evernear raises on purpose; ``exit_code`` is the process's."""

    exit_code = 1


class SettingsError(EvernearError):
    """A setting is unknown, of the wrong type, or out of its range."""

    exit_code = 2


class DataError(EvernearError):
    """Images or labels cannot be used as they are."""

    exit_code = 3


class ValidationFailed(DataError):
    """A validation rule of severity ``error`` fired."""


class StoreError(EvernearError):
    """The object store cannot be reached, refused, or holds something else."""

    exit_code = 4


class Conflict(StoreError):
    """A conditional write lost: the object is not what the writer last saw."""


class TransientStoreError(StoreError):
    """The store is unreachable, overloaded or broke off: the request was neither refused nor known to be done."""


class IntegrityError(EvernearError):
    """A hash, a stamp or a manifest does not match what it describes."""

    exit_code = 5


class TrainingError(EvernearError):
    """Training cannot go on."""

    exit_code = 6


class ServingError(EvernearError):
    """TorchServe does not start, died, or refused."""

    exit_code = 7


class PortTaken(ServingError):
    """A port that the server needs is in use."""


class Unreachable(ServingError):
    """No server answers."""

    exit_code = 8


class PredictionRefused(ServingError):
    """The server answered 4xx: the image or the request is at fault."""

    exit_code = 9


class Timeout(ServingError):
    """The server did not answer in the time that the client gives it."""

    exit_code = 11


class Busy(EvernearError):
    """Another run holds the working directory, or another deployment the Lease of the cluster."""

    exit_code = 10


class ClusterError(EvernearError):
    """Kubernetes cannot be reached, refused, or a rollout did not come up."""

    exit_code = 12


class PipelineServerError(EvernearError):
    """Kubeflow Pipelines cannot be reached or refused."""

    exit_code = 13


class SlackError(EvernearError):
    """Slack cannot be reached or refused."""

    exit_code = 14


class UserInterruptError(EvernearError):
    """Ctrl-C ended the command; the sentence says what was stopped, what remains and how to continue."""

    exit_code = 130


def no_space(error: OSError, place: Path | str) -> str | None:
    """The sentence of a disk, a quota or a limit that leaves no space at ``place``; None: it is another error."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"The disk that holds {place} is full; free some space and run again."
    if error.errno == errno.EFBIG:
        return f"{place} would be larger than this process may write (ulimit -f); raise the limit."
    # `tempfile` writes to a directory before it takes it, and does not say why it took none.
    if error.errno == errno.ENOENT and "No usable temporary directory" in str(error):
        return f"{error.strerror}: full or read-only; free some space, or name another one with TMPDIR."
    return None
