"""Tests are isolated from the user's shell. See `environment`."""

import json
import os
import subprocess
import sys

from tests import ROOT

HOSTILE = {
    "EVERNEAR_PIPELINE__ENDPOINT": "http://kfp.example",
    "EVERNEAR_STORE": "s3://someone",
    "_EVERNEAR_EVENTS": "/dev/full",
    "AWS_ENDPOINT_URL": "http://s3.example",
    "AWS_SECRET_ACCESS_KEY": "not-a-secret",
    "KFP_TOKEN": "not-a-secret",
    "SLACK_BOT_TOKEN": "xoxb-not-a-secret",
    "KUBECONFIG": "/nowhere",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "HTTP_PROXY": "http://127.0.0.1:1",
    "https_proxy": "http://127.0.0.1:1",
    "SSL_CERT_FILE": "/nowhere",
    "OMP_NUM_THREADS": "64",
    "FORCE_COLOR": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
OPT_IN = {"EVERNEAR_TEST_IMAGE": "registry.example/image"}
SCRIPT = """
import json, os, subprocess, sys
from tests import environment
inherited = subprocess.run([sys.executable, "-c", sys.argv[1]], capture_output=True, check=True, text=True).stdout
print(json.dumps({"here": dict(os.environ), "child": json.loads(inherited)}))
"""
CHILD_SCRIPT = """
import json
from tests import environment
print(json.dumps([environment.of_the_shell("KUBECONFIG"), environment.of_the_shell("http_proxy", "https_proxy")]))
"""


def test_shell_variables_do_not_reach_tests() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", SCRIPT, CHILD_SCRIPT],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **HOSTILE, **OPT_IN},
        capture_output=True,
        text=True,
        check=True,
    )
    variables = json.loads(completed.stdout)
    assert {name: value for name, value in variables["here"].items() if name in HOSTILE} == {"OMP_NUM_THREADS": "1"}
    assert OPT_IN.items() <= variables["here"].items()
    proxies = {name: HOSTILE[name] for name in ("HTTP_PROXY", "https_proxy")}
    assert variables["child"] == [{"KUBECONFIG": "/nowhere"}, proxies], "saved, also for workers that inherit them"


def test_commands_under_test_can_be_interrupted_in_a_background_job() -> None:
    """A shell without job control starts ``pytest &`` with SIGINT ignored, which processes
    inherit."""
    program = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    isolated = (
        f"from tests import environment; import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
    )
    for code, expected in ((program, "False"), (isolated, "True")):
        words = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", code]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
