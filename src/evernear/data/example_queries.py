"""Queries on the tables of a dataset (`evernear.data.tables`), for a user to start from. The
console and docs/dataset-export.md show them."""

import json

_DUCKDB = """\
SET VARIABLE dataset = {dataset};
SET VARIABLE snapshot = (SELECT digest FROM read_json(getvariable('dataset') || 'head.json'));
CREATE TABLE manifest AS
FROM read_json(getvariable('dataset') || 'manifests/' || getvariable('snapshot') || '.json');
SET VARIABLE images = (
  SELECT [getvariable('dataset') || 'images/' || part.sha256 || '.parquet' FOR part IN tables.images]
  FROM manifest
);
SET VARIABLE files = (
  SELECT [getvariable('dataset') || 'files/' || part.sha256 || '.parquet' FOR part IN tables.files]
  FROM manifest
);

SELECT label, count(*) FROM read_parquet(getvariable('images')) WHERE split = 'test' GROUP BY label ORDER BY label;
SELECT digest, label, shard, row FROM read_parquet(getvariable('images')) WHERE "group" = {group} ORDER BY digest;
SELECT name, fault FROM read_parquet(getvariable('files')) WHERE fault IS NOT NULL ORDER BY name;
"""
_PANDAS = """\
import json
from pathlib import Path

import pandas

dataset = Path({dataset})
snapshot = json.loads((dataset / "head.json").read_text())["digest"]
tables = json.loads((dataset / f"manifests/{{snapshot}}.json").read_text())["tables"]


def read(table):
    return pandas.concat(pandas.read_parquet(dataset / table / f"{{part['sha256']}}.parquet") for part in tables[table])


images, files = read("images"), read("files")
print(images[images["split"] == "test"].groupby("label").size())
print(images.loc[images["group"] == {group}, ["digest", "label", "shard", "row"]])
print(files.loc[files["fault"].notna(), ["name", "fault"]])
"""


def duckdb_query(folder: str, group: str) -> str:
    """Statements on the tables in ``folder``."""
    return _DUCKDB.format(dataset=_sql_text(f"{folder}/"), group=_sql_text(group))


def pandas_query(folder: str, group: str) -> str:
    return _PANDAS.format(dataset=json.dumps(folder, ensure_ascii=False), group=json.dumps(group, ensure_ascii=False))


def _sql_text(value: str) -> str:
    quoted = value.replace("'", "''")
    return f"'{quoted}'"
