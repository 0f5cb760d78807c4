"""What recorded sessions cost in a store of trees: replays session traces through the real recorder's store and counts.

    python benchmarks/trees_import.py TRACES [--keep DIR]

Blocks are counted a second time from the trace alone, by a trie a session. `stored / unique` are the token rows of all segments over the
tokens of nodes with different contents. "Naive" is each call's prompt and answer written out whole, what a recorder without trees
keeps: 4 bytes a prompt token, 12 an answer's (id, log-prob, version). "In memory": what the process grows by when all is recorded and
nothing sealed, text excluded (there is none). Times are CPU seconds.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from itertools import chain
from pathlib import Path

import numpy as np

from gyre_hpc.imports.importer import import_traces
from gyre_hpc.imports.recording import Recording
from gyre_hpc.imports.traces import Session, read_sessions
from trees.blocks import count_blocks
from trees.store import StoreReader, StoreWriter
from trees.verify import verify

_PAGE = 4096


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def trie_size(session: Session) -> int:
    """Nodes of a trie over the block ids of all prompts."""
    root: dict[int, dict] = {}  # type: ignore[type-arg]
    size = 0
    for request in session.requests:
        node = root
        for block in request.blocks.tolist():
            if block not in node:
                node[block] = {}
                size += 1
            node = node[block]
    return size


def from_the_trace(file: Path) -> tuple[int, int, int, int]:
    """(unique blocks, blocks of all prompts, tokens of all prompts, tokens of all answers), without our trees."""
    unique = expanded = prompts = answers = 0
    for session in read_sessions(file):
        unique += trie_size(session)
        expanded += sum(len(request.blocks) for request in session.requests)
        prompts += sum(request.prompt for request in session.requests)
        answers += sum(request.output for request in session.requests)
    return unique, expanded, prompts, answers


def stored_and_unique(reader: StoreReader) -> tuple[int, int]:
    """Token rows of all segments, and tokens of nodes that differ in what they say."""
    stored, hashes, lengths = 0, [], []
    for segment in reader.segments:
        stored += segment.rows("tokens")
        hashes.append(segment.column("nodes/hash"))
        lengths.append(segment.column("nodes/length"))
    _, first = np.unique(np.concatenate(hashes), axis=0, return_index=True)
    return stored, int(np.concatenate(lengths)[first].sum())


def reached_once(reader: StoreReader) -> bool:
    """Every sampled token is on a path from a leaf, and is one row."""
    for execution in reader.executions():
        tree = reader.tree(execution, tokens=False)
        reached = {node for leaf in tree.leaves for node in tree.path(leaf)}
        if reached != set(tree.nodes) or {c.sampled for c in tree.calls.values()} - {-1} - reached:
            return False
    return True


def in_memory(file: Path, folder: Path) -> tuple[float, int]:
    """(bytes that the process grew by, tokens recorded), nothing sealed."""
    sessions = read_sessions(file)
    first = next(sessions)
    before = resident()
    tokens = runs = 0
    with StoreWriter(folder) as writer:
        for session in chain([first], sessions):
            recording = Recording(writer, session, runs)
            recording.play()
            runs += recording.runs
            tokens += recording.tokens
            del recording
        gc.collect()
        return resident() - before, tokens


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--keep", type=Path, help="leave the store here")
    arguments = parser.parse_args()
    unique, expanded, prompts, answers = from_the_trace(arguments.traces)
    with tempfile.TemporaryDirectory(prefix="gyre-import-") as scratch:
        grown, held = in_memory(arguments.traces, Path(scratch) / "memory")
        out = arguments.keep or Path(scratch) / "store"
        gc.collect()
        before, began = resident(), time.process_time()
        found = import_traces(arguments.traces, out)
        seconds, after = time.process_time() - began, resident()
        size = sum(path.stat().st_size for path in out.iterdir())
        with StoreReader(out) as reader:
            counted = count_blocks(reader, 64)
            stored, different = stored_and_unique(reader)
            once = reached_once(reader)
        problems = verify(out)
    naive = 4 * prompts + 12 * answers
    traced = prompts + answers
    same = {True: "equal", False: "DIFFERENT"}
    row = "{:48} {:>16} {}".format
    print(row("sessions, calls", f"{found.sessions}, {found.requests}", ""))
    print(row("unique blocks (store, trie)", f"{counted[0]:,}", f"{unique:,} {same[counted[0] == unique]}"))
    print(row("blocks of all prompts (store, trace)", f"{counted[1]:,}", f"{expanded:,} {same[counted[1] == expanded]}"))
    print(row("tokens stored / unique", f"{stored / different:.4f}", f"{stored:,} / {different:,}"))
    print(row("tokens written out / stored", f"{traced / stored:.2f}", f"{traced:,} / {stored:,}"))
    print(row("bytes on disk a token", f"{size / stored:.2f}", f"{size:,}; naive {naive / stored:.1f}, {naive / size:.0f} times as many"))
    print(row("bytes in memory a token, unsealed", f"{grown / held:.2f}", f"{grown / 1e6:.0f} MB; naive {naive / held:.1f}"))
    print(row("memory of the import afterwards", f"{(after - before) / 1e6:+.0f} MB", f"{after / 1e6:.0f} MB in all"))
    print(
        row(
            "CPU seconds of the import",
            f"{seconds:.2f}",
            f"{stored / seconds / 1e6:.1f} M stored, {(prompts + answers) / seconds / 1e6:.1f} M traced tokens/s",
        )
    )
    print(row("every node on a leaf's path, every answer once", "yes" if once else "NO", ""))
    print(row("problems that verify finds", f"{len(problems)}", ""))


if __name__ == "__main__":
    main()
