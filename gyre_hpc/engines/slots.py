"""The KV cache of a running batch: one slot (row) per call, one column per position.

Invariants: the KV of position p of the call in slot r lies in column p of row r, so a column is its own position and nothing moves when
another call joins or leaves; columns at or beyond a row's length hold finite rubbish that the mask hides; active slots are rows 0..n-1.
Layout per layer: keys and values [rows, columns, kv heads, head size].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

KV = list[tuple[torch.Tensor, torch.Tensor]]
"""Per layer, the keys and values [length, kv heads, head size] of one sequence."""

_COLUMN_STEP = 128
_ROW_STEP = 16


@dataclass(frozen=True)
class Target:
    """Where the next forward pass writes and reads: rows [low, high), columns [0, width).

    `rows`, `columns` int64 [m]: the cells written, in the order of the m real ones (`source`, int64 [m]) among the pass's input tokens,
    flattened [rows of the pass * tokens]; `source` None means all of them.
    """

    low: int
    high: int
    width: int
    rows: torch.Tensor
    columns: torch.Tensor
    source: torch.Tensor | None


class SlotCache(Cache):
    """A transformers cache that writes into slots; `target` must be set before every forward pass."""

    def __init__(self, window: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self._window = window
        self._device = device
        self._shape = (0, 0)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self.target: Target | None = None

    @property
    def size(self) -> int:
        """Bytes reserved."""
        return sum(buffer.nbytes for buffer in (*self._keys, *self._values))

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for this many rows and columns; what is stored stays."""
        have_rows, have_columns = self._shape
        if rows > have_rows:
            have_rows = -(-max(rows, have_rows * 3 // 2) // _ROW_STEP) * _ROW_STEP
        if columns > have_columns:
            have_columns = min(-(-max(columns, have_columns * 5 // 4) // _COLUMN_STEP) * _COLUMN_STEP, max(self._window, columns))
        if (have_rows, have_columns) != self._shape:
            self._shape = (have_rows, have_columns)
            self._keys = [self._grown(t) for t in self._keys]
            self._values = [self._grown(t) for t in self._values]

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        new = old.new_zeros((*self._shape, *old.shape[2:]))
        new[: old.shape[0], : old.shape[1]] = old
        return new

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model's attention: store [rows, kv heads, tokens, head size], return all KV up to the target's width."""
        if self.target is None:
            raise RuntimeError("SlotCache.update without a target")
        while len(self._keys) <= layer_idx:
            self._keys.append(self._blank(key_states))
            self._values.append(self._blank(value_states))
        return self._store(self._keys[layer_idx], key_states, self.target), self._store(self._values[layer_idx], value_states, self.target)

    def _blank(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros((*self._shape, like.shape[1], like.shape[3]))

    @staticmethod
    def _store(buffer: torch.Tensor, new: torch.Tensor, target: Target) -> torch.Tensor:
        flat = new.transpose(1, 2).flatten(0, 1)
        buffer[target.rows, target.columns] = flat if target.source is None else flat[target.source]
        return buffer[target.low : target.high, : target.width].transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Of no meaning here, rows differ: positions and masks are always given to the model."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return (self.target.width if self.target else query_length), 0

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy a row's first `length` columns over another row."""
        for buffer in (*self._keys, *self._values):
            buffer[destination, :length] = buffer[source, :length]

    def save(self, row: int, length: int) -> KV:
        """A copy of a row's first `length` columns."""
        return [(k[row, :length].clone(), v[row, :length].clone()) for k, v in zip(self._keys, self._values, strict=True)]

    def load(self, row: int, kv: KV, length: int) -> None:
        """Put the first `length` positions of saved KV into a row."""
        for (k, v), keys, values in zip(kv, self._keys, self._values, strict=True):
            keys[row, :length] = k[:length]
            values[row, :length] = v[:length]

    def free(self) -> None:
        """Give all memory back."""
        self._keys, self._values, self._shape, self.target = [], [], (0, 0), None
