"""Imports of thousands of modules at once, without the garbage collector.

The collector looks at all objects again and again while they only become more: of the seconds of CPU that torch, transformers and vLLM
take to import (2,700 to 5,600 modules) it was a quarter, in every rank and engine of a run at its every start.
Invariant: afterwards the collector runs as it did before, also when an import fails.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No collection within. What is imported makes few cycles that would be freed, and those wait for the next collection."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
