"""The containers of an InferenceService: ``python -m evernear.serving.http``.

Without ``--predictor_host``, the container is a predictor, which loads a release. With it, as KServe
starts a transformer, the container prepares images for this predictor, without torch::

    python -m evernear.serving.http --model_dir DIRECTORY --http_port 8080 --grpc_port 8081
    python -m evernear.serving.http --model_dir DIRECTORY --http_port 8180 --grpc_port 8181 \\
        --predictor_host 127.0.0.1:8081 --predictor_protocol grpc-v2
"""  # noqa: W505

import signal
import sys

from evernear.common.extras import missing_library
from evernear.common.masking import mask_streams
from evernear.common.output import print_line
from evernear.errors import EvernearError


def main() -> None:
    """Serve until SIGTERM or SIGINT. An `EvernearError` is printed to stderr, and sets the exit
    code.

    The signals end the process at any time: uvicorn handles them while it serves, and raises them
    again afterwards. The kernel ignores SIGTERM in process 1, which has no handler of its own
    before.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    mask_streams()
    try:
        from evernear.serving.http.kserve import arguments, serve_container

        serve_container(arguments().parse_args())
    except ModuleNotFoundError as error:
        missing = missing_library(error)
        if missing is None:
            raise
        _fail(missing)
    except EvernearError as error:
        _fail(error)


def _fail(error: EvernearError) -> None:
    print_line(f"evernear: {error}", sys.stderr)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
