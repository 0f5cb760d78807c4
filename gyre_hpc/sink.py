"""A file for h5py whose writes may fail: HDF5 that sees a failing write leaves a library behind which crashes at the process's end.

Invariant: HDF5 is told of success after the first error, which is kept in `error`: its owner throws the file away. Nothing is buffered.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, BinaryIO


class Sink:
    """A file for h5py that turns failing writes into a remembered `error`; `told` hears how many bytes were written so far."""

    def __init__(self, raw: BinaryIO, told: Callable[[int], None] = lambda done: None) -> None:
        self._raw, self._told, self._written = raw, told, 0
        self.error: OSError | None = None

    def _try(self, action: Callable[[], Any], otherwise: Any) -> Any:
        if self.error is None:
            try:
                return action()
            except OSError as error:
                self.error = error
        return otherwise

    def write(self, data: Any) -> int:
        return int(self._try(lambda: self._write_all(memoryview(data).cast("B")), len(data)))

    def _write_all(self, data: memoryview) -> int:
        done = 0
        while done < len(data):  # a nearly full disk takes a part before it refuses
            done += self._raw.write(data[done:])
        self._written += done
        self._told(self._written)
        return done

    def truncate(self, size: int) -> int:
        return int(self._try(lambda: self._raw.truncate(size), size))

    def flush(self) -> None:
        self._try(self._raw.flush, None)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        return self._raw.tell()

    def read(self, size: int = -1) -> bytes:
        return self._raw.read(size)

    def readinto(self, buffer: Any) -> int:
        return int(self._raw.readinto(buffer) or 0)  # type: ignore[attr-defined]
