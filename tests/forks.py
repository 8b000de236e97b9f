"""Short-lived processes that are forks of a server, which has imported what they use."""

import multiprocessing
import os
import sys

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["evernear.common.parts", "evernear.release.registry", "minio"])


class Fork(CONTEXT.Process):
    """What the fake cluster uses of ``Popen([sys.executable, "-c", code, *arguments])``."""

    def __init__(self, code: str, arguments: list[str], environment: dict[str, str]) -> None:
        super().__init__(target=_run, args=(code, arguments, environment))
        self.start()

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> None:
        self.join()


def _run(code: str, arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.argv[1:] = arguments
    exec(code, {})  # noqa: S102 - a test's program
