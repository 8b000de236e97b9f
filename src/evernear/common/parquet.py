"""The stamp of a Parquet file in a store: its metadata says which version wrote it."""

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from evernear.common.frozen import require_stamp, stamp
from evernear.errors import IntegrityError

_STAMP = b"evernear"


def stamped(schema: Any) -> Any:
    """The Arrow ``schema`` of a file that this version writes."""
    return schema.with_metadata({**(schema.metadata or {}), _STAMP: json.dumps(stamp())})


def require_table_format(file: Any, source: str, remedy: str = "") -> None:
    """Compare the stamp of a Parquet file, which is a path or its content, with that of this
    version.

    Raises:
        FormatError: another version wrote it.
        IntegrityError: it is damaged. The message ends with ``remedy``.
    """
    try:
        content = pa.BufferReader(file) if isinstance(file, bytes) else file
        metadata: Mapping[bytes, bytes] = pq.read_schema(content).metadata or {}
        fields = json.loads(metadata.get(_STAMP, b"{}"))
    except (pa.ArrowException, OSError, ValueError) as error:
        ending = f"; {remedy}" if remedy else ""
        raise IntegrityError(f"{source} is not a valid Parquet file: {error}{ending}.") from None
    require_stamp(fields, source)
