"""Session traces into a new store, through the writer that a run's gateway records with (`gyre trees import`).

A session becomes a group of one execution, named after it and not valid (nothing of it may be trained on); a request becomes a call. The
trace holds counts and hashes of blocks, no tokens: `tokens` and `logprobs` are synthetic (tokens.py), and where an answer came back is
inferred (layout.py). The provenance of the store and of each segment says so.

Invariants: nothing is stored twice (a path forks where its tokens do); memory is that of one session and what is not sealed yet, at most
about SEAL_TOKENS of it; OUT appears whole or not at all. No cap on nodes, turns or sessions.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from gyre_hpc import __version__
from gyre_hpc.errors import ConfigError, GyreError
from gyre_hpc.imports.recording import Recording
from gyre_hpc.imports.traces import Session, read_sessions
from trees.files import sync_directory
from trees.store import StoreError, StoreWriter

SEAL_TOKENS = 1 << 22
"""Tokens in the journal from which on it is sealed (one session is never cut)."""


@dataclass(frozen=True)
class Imported:
    """What was brought in. `tokens` stored, `sampled` of them answers; `seconds` of the whole import."""

    out: str
    sessions: int
    requests: int
    tokens: int
    sampled: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def import_traces(file: Path, out: Path) -> Imported:
    """Make the store `out` of the sessions in `file`. ConfigError: no such traces, or `out` exists; OSError: can't read or write."""
    begun = time.monotonic()
    if out.exists():
        raise ConfigError(f"{out} exists", "give a new folder: an import makes a store of its own")
    sessions = read_sessions(file)
    first = next(sessions, None)
    if first is None:
        raise ConfigError(f"{file} holds no session", "one session a line, see docs/file-formats.md")
    partial = out.with_name(f"{out.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    try:
        counts = _fill(partial, file, first.block_size, chain([first], sessions))
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, StoreError):
            raise GyreError(error.what, error.remedy) from error
        raise
    partial.rename(out)
    sync_directory(out.parent)
    return Imported(str(out), *counts, seconds=round(time.monotonic() - begun, 3))


def _fill(folder: Path, file: Path, block_size: int, sessions: Iterator[Session]) -> tuple[int, int, int, int]:
    """(sessions, requests, tokens stored, tokens sampled)."""
    provenance = {
        "gyre_hpc": __version__,
        "imported": file.name,
        "format": "session traces with block hashes",
        "block_size": block_size,
        "token_exact": False,
        "note": "tokens and logprobs are synthetic; where an answer is part of a later prompt is inferred",
    }
    count = requests = tokens = sampled = unsealed = runs = 0
    with StoreWriter(folder, provenance) as writer:
        for session in sessions:
            if session.block_size != block_size:
                raise ConfigError(f"{file}: session {session.name} has blocks of {session.block_size}, not {block_size}", "split the file")
            recording = Recording(writer, session, runs)
            recording.play()
            runs += recording.runs
            count, requests = count + 1, requests + len(session.requests)
            tokens, sampled = tokens + recording.tokens, sampled + recording.sampled
            unsealed += recording.tokens
            if unsealed >= SEAL_TOKENS:
                writer.seal()
                unsealed = 0
        writer.seal()
    return count, requests, tokens, sampled
