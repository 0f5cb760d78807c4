"""Rows into micro-steps: which rows are computed together.

Invariants: every row is in exactly one micro-step; a micro-step holds at most `tokens_per_microstep` tokens, or one longer row
alone; the same lengths give the same packing in every process. Longest first, next fit: rows of like length meet, so padding
them to a rectangle costs little too.
"""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], tokens_per_microstep: int) -> list[list[int]]:
    """Indices of rows per micro-step. `lengths`: tokens of each row (>= 1). Ties keep the order given."""
    if tokens_per_microstep < 1:
        raise ValueError(f"tokens_per_microstep = {tokens_per_microstep}: at least 1")
    if any(length < 1 for length in lengths):
        raise ValueError("a row has at least one token")
    microsteps: list[list[int]] = []
    room = 0
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        if not microsteps or lengths[row] > room:
            microsteps.append([])
            room = tokens_per_microstep
        microsteps[-1].append(row)
        room -= lengths[row]
    return microsteps
