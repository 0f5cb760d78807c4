"""A supervisor's own folder on its node: gone when it ends, or when the next one of the same run starts there if it was killed.

Invariant: a run has one supervisor on a node at a time (the driver's lock), so whatever bears the run's name there is a dead one's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def scratch(root: Path, node: str) -> Iterator[Path]:
    """A new private folder in the node's temporary folder for the supervisor `node` of the run in `root`."""
    digest = hashlib.sha256(f"{root.resolve()} {node}".encode()).hexdigest()[:10]
    prefix = f"gyre-harness-{os.getuid()}-{digest}-"
    for stale in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield Path(folder)
