"""Parquet: one file, zstd, the columns of rows.py in fixed types.

Invariants: row groups of at most about ROW_GROUP_TOKENS tokens (one row is never cut), so memory does not grow with the store;
floats are stored bit for bit; the file's metadata say what was exported (`gyre`: a JSON object).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gyre_hpc.exports.lineage import FIELDS
from gyre_hpc.exports.rows import Row, Table

ROW_GROUP_TOKENS = 1 << 21
ROW_GROUP_ROWS = 1 << 16
_EXECUTION = [
    ("execution", pa.int64()),
    ("group", pa.int64()),
    ("index", pa.int32()),
    ("attempt", pa.int32()),
    ("task", pa.string()),
    ("size", pa.int32()),
    ("version", pa.int32()),
    ("burst", pa.int32()),
    *((name, pa.int32()) for name in FIELDS),
    ("reason", pa.string()),
    ("score", pa.float64()),
    ("valid", pa.bool_()),
    ("incomplete", pa.bool_()),
]
_TOKENS = [("tokens", pa.list_(pa.int32())), ("logprobs", pa.list_(pa.float32())), ("versions", pa.list_(pa.int32()))]
COLUMNS: dict[Table, list[tuple[str, pa.DataType]]] = {
    Table.PATHS: [
        *_EXECUTION,
        ("path", pa.int32()),
        ("leaf", pa.int64()),
        ("role", pa.string()),
        ("weight", pa.float64()),
        ("target_tokens", pa.int64()),
        ("targets", pa.list_(pa.bool_())),
        *_TOKENS,
    ],
    Table.NODES: [
        ("execution", pa.int64()),
        ("lineage", pa.int32()),
        ("fork", pa.int32()),
        ("node", pa.int64()),
        ("parent", pa.int64()),
        ("kind", pa.string()),
        ("role", pa.string()),
        ("call", pa.int64()),
        ("target", pa.bool_()),
        *_TOKENS,
    ],
    Table.CALLS: [
        ("execution", pa.int64()),
        ("call", pa.int64()),
        ("prompt", pa.int64()),
        ("sampled", pa.int64()),
        ("role", pa.string()),
        ("fate", pa.string()),
        ("finish", pa.string()),
        ("difference", pa.string()),
    ],
    Table.EXECUTIONS: [
        *_EXECUTION,
        *((name, pa.int64()) for name in ("nodes", "calls", "leaves", "tokens", "target_tokens")),
    ],
}
"""Columns of each table, in order."""


def write(file: Path, table: Table, rows: Iterable[Row], about: Mapping[str, Any]) -> int:
    """Write all rows; returns how many. `about` goes into the file's metadata."""
    schema = pa.schema(COLUMNS[table], metadata={"gyre": json.dumps(about, default=str)})
    long = table in (Table.PATHS, Table.NODES)
    count = tokens = 0
    batch: list[Row] = []
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for row in rows:
            count += 1
            batch.append(row)
            tokens += len(row["tokens"]) if long else 0
            if tokens >= ROW_GROUP_TOKENS or len(batch) >= ROW_GROUP_ROWS:
                writer.write_table(_table(batch, schema))
                batch, tokens = [], 0
        if batch or not count:
            writer.write_table(_table(batch, schema))
    return count


def _table(rows: list[Row], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pydict({field.name: pa.array([row[field.name] for row in rows], field.type) for field in schema}, schema=schema)
