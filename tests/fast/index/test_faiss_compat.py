from pathlib import Path

import pytest
from threadpoolctl import threadpool_info

from evernear.index.faiss_compat import core_type

NEW = "avx2 fma avx512f avx512bw avx512cd avx512dq avx512vl amx_tile"
CPUINFO = """processor\t: 0
vendor_id\t: {vendor}
model name\t: A processor
flags\t\t: fpu sse2 {flags}

"""


@pytest.mark.parametrize(
    ("vendor", "flags", "name"),
    [
        ("GenuineIntel", NEW, "SKYLAKEX"),
        ("GenuineIntel", "avx2 fma avx512f", "HASWELL"),
        ("GenuineIntel", "sse3", None),
        ("AuthenticAMD", NEW, None),
    ],
)
def test_openblas_gets_instructions_that_the_processor_has(tmp_path: Path, vendor, flags, name):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(CPUINFO.format(vendor=vendor, flags=flags) * 2)
    assert core_type(tmp_path) == name


def test_openblas_is_left_alone_without_a_description_of_the_processor(tmp_path: Path):
    assert core_type(tmp_path) is None


def test_openblas_of_faiss_uses_these_instructions():
    """OpenBLAS 0.3.15 treats a Sapphire Rapids as a Prescott, and uses SSE3."""
    name = core_type()
    pools = [pool for pool in threadpool_info() if "faiss" in pool["filepath"]]
    found = [pool["architecture"] for pool in pools if pool["internal_api"] == "openblas"]
    if name is None or not found:
        pytest.skip("not an Intel processor with AVX2, or FAISS does not bundle OpenBLAS")
    assert found == [{"SKYLAKEX": "SkylakeX", "HASWELL": "Haswell"}[name]]
