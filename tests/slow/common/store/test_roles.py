"""The commands of a role run with exactly its policy, on a real SeaweedFS."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real.common.store.test_permissions import EMPTY, seaweedfs_with_users

pytestmark = pytest.mark.slow


def test_pipeline_and_server_run_with_their_policies(tmp_path: Path) -> None:
    with seaweedfs_with_users(tmp_path) as server:

        def run(user: str, *command: str) -> str:
            access_key, secret_key = server.keys[user]
            keys = {"AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}
            here = {"EVERNEAR_STORE": EMPTY, "EVERNEAR_WORKDIR": str(tmp_path / user)}
            environment = os.environ | keys | here | {"AWS_ENDPOINT_URL_S3": server.endpoint}
            words = [sys.executable, "-m", "evernear", *command]
            completed = subprocess.run(words, env=environment, capture_output=True, text=True)
            assert completed.returncode == 0, completed.stdout + completed.stderr
            return completed.stdout

        trained = run("writer", "run", "--source", "digits", "--preset", "quick", "--set", "target=registry")
        assert "promoted" in trained
        (tmp_path / "server").mkdir()
        assert "champion" in run("server", "registry", "list")
        assert "1 release, champion " in run("server", "doctor", "store")
        assert "1 release, champion " in run("watcher", "doctor", "store")
        assert "conditional writes; 1 release, champion " in run("writer", "doctor", "store")
