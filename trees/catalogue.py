"""Which sealed segments belong to a store, and which are to be merged: what a journal's header says of them. Pure.

Ordering key: age, oldest content first; a merged segment takes the place of what it was made of. An `Entry` has the size and
the digest of the whole file, so any changed byte is found, and the least and greatest ids, so most questions open one file only.

Policy (`to_merge`): size-tiered. Tier t holds files of [BASE * 8^t, BASE * 8^(t + 1)) bytes; as soon as FAN files of one tier exist, the
oldest FAN become one. A tier keeps at most FAN - 1 files, so their number is bounded by the logarithm of the bytes, however
many seals there were, and each byte is written again once a tier. A merge never makes more than MERGE_TOKENS tokens; a segment
above half of that is left alone: there the number grows with the data (and in no other way).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

BASE = 1 << 16
FAN = 8
"""Files of one tier from which on they become one."""
_BITS = 3
"""A tier is 8 times the one below."""
MERGE_TOKENS = 1 << 24
DIGEST_BYTES = 16
NO_DIGEST = ""


@dataclass(frozen=True)
class Entry:
    """One segment that counts. Ranges are (least, greatest) id, (-1, -1) if there is none; they may overlap those of other segments.

    `bytes` and `digest` (hex, BLAKE2b-128) of the whole file; `tokens` in it.
    """

    number: int
    bytes: int
    digest: str
    tokens: int
    executions: tuple[int, int]
    groups: tuple[int, int]
    nodes: tuple[int, int]

    def as_dict(self) -> dict[str, Any]:
        """For the header's JSON."""
        return asdict(self)

    @staticmethod
    def of(fields: dict[str, Any]) -> Entry:
        """From the header's JSON. TypeError, ValueError: it is none."""
        spans = {name: _span(fields[name]) for name in ("executions", "groups", "nodes")}
        entry = Entry(**{**fields, **spans})
        if not all(isinstance(value, int) for value in (entry.number, entry.bytes, entry.tokens)) or not isinstance(entry.digest, str):
            raise TypeError(f"an entry of a segment with {fields}")
        return entry


def _span(pair: Any) -> tuple[int, int]:
    first, last = pair
    return int(first), int(last)


def digest_of(data: bytes) -> str:
    """The digest of a whole file."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def tier(size: int) -> int:
    """The tier of a file of `size` bytes."""
    return max(0, (size // BASE).bit_length() - 1) // _BITS


def to_merge(entries: Sequence[Entry]) -> list[Entry]:
    """The segments that should become one now, oldest first; empty if the number is all right.

    When merging makes the next tier full as well, that tier is merged in the same step: nothing is written twice.
    """
    tiers: dict[int, list[Entry]] = {}
    for entry in entries:
        if entry.tokens <= MERGE_TOKENS // 2:
            tiers.setdefault(tier(entry.bytes), []).append(entry)
    chosen: list[Entry] = []
    for level in sorted(tiers):
        # What was chosen so far becomes one file of this tier or a higher one.
        joins = bool(chosen) and tier(sum(entry.bytes for entry in chosen)) <= level
        if len(tiers[level]) + joins >= FAN:
            chosen = _fitting(tiers[level][: FAN - joins], chosen if joins else [])
    return sorted(chosen, key=list(entries).index) if chosen else []


def _fitting(here: Sequence[Entry], chosen: list[Entry]) -> list[Entry]:
    """As many of the oldest as a merged segment may hold; at least two fit, since each has half of the tokens at most."""
    taken, tokens = list(chosen), sum(entry.tokens for entry in chosen)
    for entry in here:
        if tokens + entry.tokens > MERGE_TOKENS:
            break
        taken.append(entry)
        tokens += entry.tokens
    return taken
