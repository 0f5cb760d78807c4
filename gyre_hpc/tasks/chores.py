"""Chores: small file tasks, generated from a seed, in Harbor format. A task is 1 or more *parts*, each worth the same.

Invariants:
- `draw(seed, index, difficulty)` is pure: the same arguments give the same chore on every machine;
- *unseen*: within a seed no two indices below `HORIZON` share their first part, hence no two tasks are equal; and no part of a task
  occurs in a demonstration (`draw_demonstrated`): the space of parts is cut in two halves by a checksum, one for each use;
- doing nothing scores 0 and the reference solution 1: every part asks for a change, and no two parts of a task share a file.

The family is narrow on purpose (five chores of two arguments each): a model of some hundred thousand parameters can learn it in minutes
on two CPU cores. Difficulty is the number of parts, so that a score is a multiple of 1 / difficulty.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

_POOL = """
acorn amber anvil apple arrow aspen badge basil beach berry birch bread brick brook cabin camel candle canoe
cedar chalk cloud clover cocoa comet coral crane daisy delta eagle ember fable falcon feather fern flint
forest fossil garden ginger glacier grape hazel heron honey indigo island ivory jasmine juniper kettle lagoon
lantern lemon lilac linen maple marble meadow melon mint moss nectar north olive
"""
WORDS = tuple(_POOL.split())
NAMES = tuple(f"{word}.txt" for word in WORDS)
NUMBERS = tuple(str(number) for number in range(10, 100))
MAX_DIFFICULTY = 9
"""Steps are numbered with one digit; a part uses up to two of the file names."""


@dataclass(frozen=True)
class Kind:
    """One sort of chore. `line` and `shell` are format strings over `a` and `b`; `second` says what `b` is."""

    name: str
    line: str
    shell: str
    second: str


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("create", "Create {a} with {b}", "echo {b} > {a}", "number"),
        Kind("append", "Append {b} to {a}", "echo {b} >> {a}", "number"),
        Kind("copy", "Copy {a} to {b}", "cp {a} {b}", "name"),
        Kind("rename", "Rename {a} to {b}", "mv {a} {b}", "name"),
        Kind("delete", "Delete {a} and {b}", "rm {a} {b}", "name"),
    )
}


@dataclass(frozen=True)
class Part:
    """One step: a kind, its two arguments, and the text (a number) that its files hold at the start."""

    kind: str
    a: str
    b: str
    before: str

    @property
    def line(self) -> str:
        """The step as the instruction words it."""
        return KINDS[self.kind].line.format(a=self.a, b=self.b)

    @property
    def shell(self) -> str:
        """A command that does it."""
        return KINDS[self.kind].shell.format(a=self.a, b=self.b)

    @property
    def names(self) -> frozenset[str]:
        """The files that the part is about."""
        return frozenset({self.a, self.b} if KINDS[self.kind].second == "name" else {self.a})

    @property
    def initial(self) -> dict[str, str]:
        """Files (name -> text) that must exist at the start."""
        if self.kind == "create":
            return {}
        if self.kind == "delete":
            return {self.a: f"{self.before}\n", self.b: f"{self.before}\n"}
        return {self.a: f"{self.before}\n"}

    @property
    def wanted(self) -> dict[str, str | None]:
        """Files as they must be at the end: their text without trailing line ends, or None for "must not exist"."""
        match self.kind:
            case "create":
                return {self.a: self.b}
            case "append":
                return {self.a: f"{self.before}\n{self.b}"}
            case "copy":
                return {self.a: self.before, self.b: self.before}
            case "rename":
                return {self.a: None, self.b: self.before}
            case _:
                return {self.a: None, self.b: None}

    def done(self, files: Mapping[str, str]) -> bool:
        """Whether a workspace (name -> text) satisfies this part."""
        for name, text in self.wanted.items():
            have = files.get(name)
            if (have is None) != (text is None) or (have is not None and have.rstrip("\n") != text):
                return False
        return True


@dataclass(frozen=True)
class Chore:
    """A drawn task: its parts in order. Parts share no file."""

    parts: tuple[Part, ...]

    @property
    def instruction(self) -> str:
        """Numbered lines, one step each."""
        return "\n".join(f"{number}. {part.line}" for number, part in enumerate(self.parts, 1))

    @property
    def initial(self) -> dict[str, str]:
        """All files at the start."""
        return {name: text for part in self.parts for name, text in part.initial.items()}

    def score(self, files: Mapping[str, str]) -> float:
        """Fraction of the parts that a workspace satisfies: what the verifier computes, in Python."""
        return sum(part.done(files) for part in self.parts) / len(self.parts)


def draw(seed: int, index: int, difficulty: int) -> Chore:
    """The task number `index` of a seed. Raises ValueError for a difficulty outside 1..MAX_DIFFICULTY."""
    if not 1 <= difficulty <= MAX_DIFFICULTY:
        raise ValueError(f"difficulty {difficulty} is not in 1..{MAX_DIFFICULTY}")
    rng = random.Random(f"chore {seed} {index}")
    pool = _half(1)
    stride, offset = _walk(seed, len(pool))
    first = pool[(stride * index + offset) % len(pool)]
    return _complete(rng, first, difficulty, pool)


def draw_demonstrated(rng: random.Random, difficulty: int) -> Chore:
    """A chore for a demonstration, from the half of the parts that no task uses."""
    pool = _half(0)
    return _complete(rng, rng.choice(pool), difficulty, pool)


def _complete(rng: random.Random, first: tuple[str, str, str], difficulty: int, pool: list[tuple[str, str, str]]) -> Chore:
    parts: list[Part] = []
    used: set[str] = set()
    combination = first
    while True:
        kind, a, b = combination
        part = Part(kind, a, b, rng.choice(NUMBERS))
        clash = part.before == b  # an appended number differs from what is there, so that the two are told apart
        if clash and not parts and combination == first:
            continue
        if not clash and used.isdisjoint(part.names):
            parts.append(part)
            used |= part.names
            if len(parts) == difficulty:
                return Chore(tuple(parts))
        combination = rng.choice(pool)


@lru_cache(maxsize=2)
def _half(half: int) -> list[tuple[str, str, str]]:
    """Every (kind, a, b) of one half of the space, in a fixed order that mixes kinds."""
    members = [
        (kind.name, a, b)
        for a in NAMES
        for kind in KINDS.values()
        for b in (NAMES if kind.second == "name" else NUMBERS)
        if a != b and zlib.crc32(f"{kind.name} {a} {b}".encode()) % 2 == half
    ]
    random.Random("order").shuffle(members)
    return members


HORIZON = len(_half(1))
"""Indices of one seed before first parts repeat."""


def _walk(seed: int, size: int) -> tuple[int, int]:
    """Stride and offset of a walk that visits each of `size` places once."""
    rng = random.Random(f"walk {seed}")
    while True:
        stride = rng.randrange(1, size)
        if gcd(stride, size) == 1:
            return stride, rng.randrange(size)
