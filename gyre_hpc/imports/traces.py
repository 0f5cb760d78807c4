"""Session traces without content: a JSON object a line, gzip or plain (format of kv-cache-tester, "requests with block hashes").

Of a session: `id`, `block_size` (tokens), `requests`. Of a request: `in` and `out` (tokens of prompt and answer), `hash_ids` (one id for
each *whole* block of the prompt; within a session equal ids after equal ids are the same text), `stop`. A request of type `subagent` has
no prompt but `requests` of its own, in the same scope of ids. Ids mean nothing outside their session.

Invariants: sessions are read one at a time, so memory does not grow with the file; order is that of the file, sub-agents where they stand.
Every departure from the format is a ConfigError that names the line.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from gyre_hpc.errors import ConfigError

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, eq=False)
class Request:
    """One model call. `blocks` int64[prompt // block_size]; `agent`: the sub-agent that made it, or ""."""

    blocks: NDArray[np.int64]
    prompt: int
    output: int
    agent: str
    finish: str


@dataclass(frozen=True, eq=False)
class Session:
    """The calls of one session in the order of the file."""

    name: str
    block_size: int
    requests: tuple[Request, ...]


def read_sessions(path: Path) -> Iterator[Session]:
    """The sessions of a file. ConfigError: not such a file; OSError: can't be read."""
    if not path.is_file():
        raise ConfigError(f"{path} is no file", "give a JSONL file of session traces, plain or .gz")
    with _open(path) as lines:
        for number, line in enumerate(_whole(path, lines), 1):
            if not line.strip():
                continue
            try:
                yield _session(line)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                what = f"no key {error}" if isinstance(error, KeyError) else str(error)
                raise ConfigError(
                    f"{path} line {number} is no session trace ({what})", "one session a line, see docs/file-formats.md"
                ) from error


def _whole(path: Path, lines: IO[bytes]) -> Iterator[bytes]:
    try:
        yield from lines
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{path} is damaged ({error})", "get the file again") from error


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        zipped = file.read(2) == _GZIP
    return gzip.open(path, "rb") if zipped else path.open("rb")  # type: ignore[return-value]


def _session(line: bytes) -> Session:
    row = orjson.loads(line)
    size = _count(row, "block_size", 1)
    return Session(str(row["id"]), size, tuple(_requests(row["requests"], size, "")))


def _requests(rows: list[dict[str, Any]], size: int, agent: str) -> Iterator[Request]:
    for row in rows:
        if "requests" in row:
            yield from _requests(row["requests"], size, str(row.get("agent_id") or "sub-agent"))
            continue
        prompt, output = _count(row, "in", 1), _count(row, "out", 0)
        blocks = np.array(row["hash_ids"], np.int64)
        if blocks.shape != (prompt // size,):
            raise ValueError(f"{len(blocks)} block ids for a prompt of {prompt} tokens in blocks of {size}")
        yield Request(blocks, prompt, output, agent, "length" if row.get("stop") == "max_tokens" else "stop")


def _count(row: dict[str, Any], key: str, least: int) -> int:
    value = row[key]
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{key} = {value!r}: a whole number from {least} on")
    return value
