"""Committed files that are built from others match these."""

import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from evernear.serving.configuration import FRONTEND_ARCHIVE
from tests import ROOT


def test_jar_was_built_from_the_committed_sources() -> None:
    build = runpy.run_path(str(ROOT / ".ci" / "build_frontend.py"))
    with zipfile.ZipFile(FRONTEND_ARCHIVE) as archive:
        assert archive.read(build["HASH_FILE"]).decode() == build["source_sha256"](), "run `make frontend`"


@pytest.mark.parametrize("proto", ["client/inference.proto", "http/open_inference.proto"])
def test_generated_protobuf_modules_match_the_proto_file(tmp_path: Path, proto: str) -> None:
    source, proto = ROOT / "src", f"evernear/serving/{proto}"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{source}", f"--python_out={tmp_path}", proto]
    subprocess.run([*command, f"--pyi_out={tmp_path}"], check=True)
    for suffix in ("_pb2.py", "_pb2.pyi"):
        name = proto.replace(".proto", suffix)
        assert (tmp_path / name).read_text() == (source / name).read_text()
