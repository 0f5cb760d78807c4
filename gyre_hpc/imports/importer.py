"""Recordings of others into a new store, through the writer that a run's gateway records with (`gyre trees import`).

A session becomes a group of one execution, named after it and not valid (nothing of it may be trained on); a request becomes a call.
Two kinds, told by their first line; neither is token-exact, and the provenance of the store and of each segment says so:
- session traces (traces.py): counts and hashes of blocks, no tokens: `tokens` and `logprobs` are synthetic (tokens.py), and where an answer
  came back is inferred (layout.py);
- Claude Code's session files (claude.py): text, tokenised anew (texts.py), all of it context.

Invariants: nothing is stored twice (a path forks where its tokens do); memory is that of one session and what is not sealed yet, at most
about SEAL_TOKENS of it; OUT appears whole or not at all. No cap on nodes, turns or sessions.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from gyre_hpc import __version__
from gyre_hpc.errors import ConfigError, GyreError
from gyre_hpc.imports.claude import find_files, is_entry, read_session
from gyre_hpc.imports.playing import Playing
from gyre_hpc.imports.recording import Recording
from gyre_hpc.imports.texts import ByteTexts, ModelTexts, Texts
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


def import_recording(path: Path, out: Path, model: Path | None = None) -> Imported:
    """Make the store `out` of what `path` holds: traces, or Claude Code's sessions (a file, or a folder of them).

    `model`: whose tokens the text becomes; None: bytes. ConfigError: nothing of the kind, or `out` exists; OSError: can't read or write.
    """
    if path.is_dir() or (path.is_file() and is_entry(_first_line(path))):
        return _import_claude(path, out, model)
    if model is not None:
        raise ConfigError(f"--model with {path}", "session traces hold no text: take it out")
    return import_traces(path, out)


def import_traces(file: Path, out: Path) -> Imported:
    """Make the store `out` of the session traces in `file`. ConfigError: no such traces, or `out` exists; OSError: can't read or write."""
    begun = time.monotonic()
    _refuse(out)
    sessions = read_sessions(file)
    first = next(sessions, None)
    if first is None:
        raise ConfigError(f"{file} holds no session", "one session a line, see docs/file-formats.md")
    return _made(out, begun, lambda partial: _fill(partial, file, first.block_size, chain([first], sessions)))


def _import_claude(path: Path, out: Path, model: Path | None) -> Imported:
    begun = time.monotonic()
    _refuse(out)
    files = find_files(path)
    texts: Texts = ByteTexts()
    if model is not None:
        from gyre_hpc.gateway.text.template import TurnRenderer

        texts = ModelTexts(TurnRenderer(model))
    return _made(out, begun, lambda partial: _fill_texts(partial, path, files, texts))


def _refuse(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out} exists", "give a new folder: an import makes a store of its own")
    if not out.parent.is_dir():
        raise ConfigError(f"{out} can't be made", "give a new folder in one that exists")


def _made(out: Path, begun: float, fill: Callable[[Path], tuple[int, int, int, int]]) -> Imported:
    """Let `fill` make a store, which then becomes `out`."""
    partial = out.with_name(f"{out.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    try:
        counts = fill(partial)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, StoreError):
            raise GyreError(error.what, error.remedy) from error
        raise
    partial.rename(out)
    sync_directory(out.parent)
    return Imported(str(out), *counts, seconds=round(time.monotonic() - begun, 3))


def _fill_texts(folder: Path, path: Path, files: Mapping[str, Sequence[Path]], texts: Texts) -> tuple[int, int, int, int]:
    """(sessions, requests, tokens stored, tokens sampled: none)."""
    provenance = {
        "gyre_hpc": __version__,
        "imported": path.name,
        "format": "Claude Code sessions",
        "tokenizer": texts.name,
        "token_exact": False,
        "note": "text only: tokens are of another tokenizer than the one that sampled them; no log-probs, answers are context",
    }
    requests = tokens = unsealed = 0
    with StoreWriter(folder, provenance) as writer:
        for name, own in files.items():
            playing = Playing(writer, read_session(name, own), texts)
            try:
                playing.play()
            except ValueError as error:
                raise ConfigError(
                    f"session {name} can't be written by this model: {error}", "take another model, or none (bytes)"
                ) from None
            requests, tokens, unsealed = requests + playing.calls, tokens + playing.tokens, unsealed + playing.tokens
            if unsealed >= SEAL_TOKENS:
                writer.seal()
                unsealed = 0
        writer.seal()
    return len(files), requests, tokens, 0


def _first_line(path: Path) -> bytes:
    with path.open("rb") as lines:
        return next((line for line in lines if line.strip()), b"")


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
