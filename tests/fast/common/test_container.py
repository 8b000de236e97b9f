"""The memory limit of a container; the tests of `evernear.common.processes` cover the CPU limit."""

import math
from pathlib import Path

import pytest

from evernear.common.processes import memory_limit_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("limit_bytes", "contents"),
    [
        pytest.param(math.inf, {}, id="no cgroups"),
        pytest.param(math.inf, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"}, id="v2, no limit"),
        pytest.param(GIB, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": f"{GIB}"}, id="v2, a container"),
        pytest.param(
            GIB,
            {
                "proc/self/cgroup": "0::/pod/container",
                "sys/fs/cgroup/pod/memory.max": f"{GIB}",
                "sys/fs/cgroup/pod/container/memory.max": f"{2 * GIB}",
            },
            id="v2, a lower limit above",
        ),
        pytest.param(
            GIB,
            {
                "proc/self/cgroup": "12:memory:/docker/7\n4:cpu,cpuacct:/docker/7",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}",
                "sys/fs/cgroup/cpu/memory.limit_in_bytes": "1",
            },
            id="v1, a container",
        ),
        pytest.param(
            math.inf,
            {"proc/self/cgroup": "1:memory:/", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"},
            id="v1, no limit",
        ),
    ],
)
def test_memory_limit(tmp_path: Path, limit_bytes: float, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert memory_limit_bytes(tmp_path) == limit_bytes
