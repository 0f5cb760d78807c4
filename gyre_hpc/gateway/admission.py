"""Which execution the secret of a harness stands for.

Invariants: a secret is "<execution>-<token>", compared in constant time; that of an execution which is over is told apart from a wrong
one, for the REMEMBERED that ended last. Not thread-safe: one event loop calls it.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Callable

REMEMBERED = 10_000
"""Executions that are over whose secrets are still known, to be told so."""


class Over(Exception):
    """A secret of an execution that is over."""


class Admission:
    """`token_of` makes the token of an execution."""

    def __init__(self, token_of: Callable[[int], str]) -> None:
        self._token_of = token_of
        self._live: dict[int, str] = {}
        self._spent: OrderedDict[int, str] = OrderedDict()

    def admit(self, execution: int) -> None:
        """It begins: its secret is good from now on."""
        self._live[execution] = self._token_of(execution)

    def secret(self, execution: int) -> str:
        """Of an execution that was admitted and is not over."""
        return f"{execution}-{self._live[execution]}"

    def end(self, execution: int) -> None:
        """It is over; nothing for one that was never admitted."""
        token = self._live.pop(execution, None)
        if token is None:
            return
        self._spent[execution] = token
        if len(self._spent) > REMEMBERED:
            self._spent.popitem(last=False)

    def execution_of(self, secret: str) -> int | None:
        """The execution that a secret lets in, None for a wrong one. Raises Over."""
        name, _, token = secret.partition("-")
        execution = int(name) if name.isascii() and name.isdigit() and len(name) < 19 else -1
        live = self._live.get(execution)
        known = live if live is not None else self._spent.get(execution, "")
        if not hmac.compare_digest(known.encode(), token.encode(errors="replace")) or not known:
            return None
        if live is None:
            raise Over(f"execution {execution} is over")
        return execution
