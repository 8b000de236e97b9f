"""`local_pipeline` whose steps are forks of its process, which has imported torch and kfp."""

import gc
import os
import sys
import traceback
from collections.abc import Mapping
from types import SimpleNamespace

from kfp.dsl import executor_main

import evernear.deployment.local
import evernear.embedding.export
import evernear.evaluation.evaluate
import evernear.reporting.page  # noqa: F401 - what the steps import
from evernear.kubeflow import local_pipeline
from tests import releases  # noqa: F401 - likewise


class ForkedStep:
    """What `local_pipeline` uses of ``Popen``."""

    def __init__(self, command: list[str], env: Mapping[str, str], **_: object) -> None:
        sys.stdout.flush()
        output, written = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.dup2(written, 1)
            os.dup2(written, 2)
            os._exit(_run(command, env))
        os.close(written)
        self.stdout = os.fdopen(output, "rb")

    def __enter__(self) -> "ForkedStep":
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def _run(command: list[str], env: Mapping[str, str]) -> int:
    """Run ``python -m kfp.dsl.executor_main ARGUMENTS``."""
    os.environ.update(env)
    sys.argv = command[2:]
    try:
        executor_main.executor_main()
    except SystemExit as ended:
        return int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    gc.freeze()
    local_pipeline.subprocess = SimpleNamespace(Popen=ForkedStep, PIPE=None, STDOUT=None)  # type: ignore[assignment]
    sys.exit(local_pipeline.main())
