"""Whether a store with very many sealed executions stays small in memory, in files and in time.

    python benchmarks/trees_many.py [--executions 100000] [--each 256] [--tokens 40]

Records executions of a few tokens in groups of 8 under one shared prefix and seals every `--each` of them. At every tenth it prints:
segments there are, bytes on disk an execution, memory of the process, CPU milliseconds a seal (merges included) since the last line.
Then a reader in a process of its own opens the store, lists every execution, and reads trees from everywhere. Times are CPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.trees_import import resident
from trees.records import CallEnd, Execution, ExecutionEnd, Fate, Group, Intent, Node, NodeKind, Role
from trees.store import StoreReader, StoreWriter

GROUP = 8
SHARED = np.arange(200, dtype=np.int32)


def record(writer: StoreWriter, execution: int, tokens: int) -> None:
    """One execution of one call."""
    if execution % GROUP == 0:
        writer.append(Group(execution // GROUP, f"tasks/{execution // GROUP}", GROUP, 0, 0))
    assert writer.allocate_execution() == execution
    writer.append(Execution(execution, execution // GROUP, execution % GROUP, 0))
    root = writer.context_node(-1, SHARED, execution, -1, Role.MAIN)
    call, node = writer.allocate_call(), writer.allocate_node()
    writer.append(Intent(call, execution, root, Role.MAIN, bytes(16)))
    columns = np.arange(tokens, dtype=np.int32), np.full(tokens, -0.5, np.float32), np.zeros(tokens, np.int32)
    writer.append(Node(node, root, execution, call, NodeKind.SAMPLED, Role.MAIN, *columns))
    writer.append(CallEnd(call, execution, node, Fate.DELIVERED, "stop", "clean"))
    writer.append(ExecutionEnd(execution, "finished", 0.5, True, 1, tokens, 1.0))


def write(folder: Path, executions: int, each: int, tokens: int) -> None:
    """The writer's part, with a line now and then."""
    seals, began = 0, time.process_time()
    sealing = 0.0
    print(f"{'executions':>12} {'segments':>9} {'bytes each':>11} {'memory MB':>10} {'ms a seal':>10}")
    with StoreWriter(folder) as writer:
        for execution in range(executions):
            record(writer, execution, tokens)
            if execution % each == each - 1:
                writer.commit()
                began = time.process_time()
                writer.seal()
                sealing += time.process_time() - began
                seals += 1
            if (execution + 1) % (executions // 10) == 0:
                files = list(folder.glob("segment-*.h5"))
                size = sum(path.stat().st_size for path in files) / (execution + 1)
                print(f"{execution + 1:12,} {len(files):9} {size:11.0f} {resident() / 1e6:10.0f} {1000 * sealing / max(1, seals):10.1f}")
                seals, sealing = 0, 0.0


def read(folder: Path, executions: int) -> None:
    """The reader's part."""
    before, began = resident(), time.process_time()
    with StoreReader(folder) as reader:
        print(f"open: {1000 * (time.process_time() - began):.1f} ms, {(resident() - before) / 1e6:+.1f} MB")
        began, count = time.process_time(), 0
        for _ in reader.heads():
            count += 1
        print(f"{count:,} heads: {time.process_time() - began:.1f} s, {(resident() - before) / 1e6:+.1f} MB")
        began, count = time.process_time(), 0
        for _ in reader.groups().values():
            count += 1
        print(f"{count:,} groups: {time.process_time() - began:.1f} s, {(resident() - before) / 1e6:+.1f} MB")
        began, chosen = time.process_time(), random.Random(0).sample(range(executions), min(executions, 200))
        for execution in chosen:
            assert reader.tree(execution).execution.execution == execution
        print(f"{len(chosen)} trees at random: {1000 * (time.process_time() - began) / len(chosen):.1f} ms each", end="")
        print(f", {(resident() - before) / 1e6:+.1f} MB")


def main() -> None:
    """Prints a table and the reader's lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--executions", type=int, default=100_000)
    parser.add_argument("--each", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=40)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gyre-many-") as scratch:
        write(Path(scratch), arguments.executions, arguments.each, arguments.tokens)
        child = multiprocessing.get_context("spawn").Process(target=read, args=(Path(scratch), arguments.executions))
        child.start()
        child.join()


if __name__ == "__main__":
    main()
