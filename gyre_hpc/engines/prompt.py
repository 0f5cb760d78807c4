"""The token ids of a prompt, with their JSON made once for each part.

A prompt is the path of a tree: hundreds of runs, all but the last few as in the call before. Writing 700,000 ids as JSON takes 15 ms,
joining the texts of runs under one. Invariant: `Prompt` is the sequence of its ids; `request_json` is what `orjson.dumps` would make,
whatever type the prompt has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
import orjson
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


class Run:
    """Some ids in a row: int32[n >= 1]. Their text is kept until `forget`."""

    __slots__ = ("_text", "tokens")

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self._text: bytes | None = None

    @property
    def text(self) -> bytes:
        """The ids as JSON, without brackets."""
        if self._text is None:
            self._text = orjson.dumps(np.ascontiguousarray(self.tokens), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        return self._text

    def forget(self) -> int:
        """Drop the text; how many bytes that was."""
        size = len(self._text or b"")
        self._text = None
        return size


class Prompt(Sequence[int]):
    """The ids of these runs, one after the other. Immutable."""

    __slots__ = ("_length", "runs")

    def __init__(self, runs: Sequence[Run], length: int = -1) -> None:
        """`length`: how many ids they have, where the caller knows."""
        self.runs = runs
        self._length = length if length >= 0 else sum(len(run.tokens) for run in runs)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        found = self.array()[index]
        return found.tolist() if isinstance(index, slice) else int(found)

    def __iter__(self) -> Iterator[int]:
        return iter(self.array().tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == len(self) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Prompt({list(self)})"

    def array(self) -> Tokens:
        """All ids: int32[n]."""
        return np.concatenate([run.tokens for run in self.runs]) if self.runs else np.zeros(0, np.int32)


def extended(prompt: Sequence[int], tokens: Sequence[int] | Tokens) -> Sequence[int]:
    """A prompt with more ids behind it."""
    if not len(tokens):
        return prompt
    if isinstance(prompt, Prompt):
        return Prompt([*prompt.runs, Run(np.asarray(tokens, np.int32))], len(prompt) + len(tokens))
    return [*prompt, *map(int, tokens)]


def request_json(name: str, prompt: Sequence[int], rest: Mapping[str, Any]) -> bytes:
    """The JSON object {`name`: prompt, **`rest`}; `rest` is not empty."""
    if not isinstance(prompt, Prompt):
        return orjson.dumps({name: list(prompt), **rest})
    texts = [run._text or run.text for run in prompt.runs] or [b""]  # 1,000 runs: a property costs too much
    texts[0] = b"{" + orjson.dumps(name) + b":[" + texts[0]
    texts[-1] += b"]," + orjson.dumps(rest)[1:]
    return b",".join(texts)
