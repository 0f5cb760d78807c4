"""What it costs to move the executions of a cell that leaves rollout, out of bytes and bandwidth; frozen, pure.

Under `nixl` their KV travels: the source keeps it until all of it has arrived, so the transfer is longer by that, and the executions wait
for it. Under `recompute` the source is free at once, and the executions wait until their contexts are computed again where they went.
Invariant: both go by tokens on a node, executions x context / nodes of the cell, because a cell's links, and the engines of the cell that
takes over, are as many as its nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gyre_hpc.errors import ConfigError

GIGA = 1e9


class How(Enum):
    """Strategies, as `rollout.handover` names them."""

    NIXL = "nixl"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class HandOver:
    """The default costs nothing beside `Costs.hand_over`, and what `Costs.to_training` has in it already."""

    how: How = How.NIXL
    context: float = 0.0
    """Tokens that an execution holds when it moves, on average."""
    kv_bytes: float = 0.0
    """Of one token: layers x KV heads x head size x 2 x bytes of a number."""
    link: float = 0.0
    """Bytes a second that one node sends."""
    prefill: float = 0.0
    """Tokens a second that one node computes."""

    @property
    def any(self) -> bool:
        return self.context > 0

    def moved_bytes(self, executions: int) -> float:
        """KV that travels for so many."""
        return executions * self.context * self.kv_bytes if self.how is How.NIXL else 0.0

    def wait(self, executions: int, nodes: int) -> float:
        """Seconds that each of `executions`, moved at once from a cell of `nodes` nodes, waits."""
        if not self.any:
            return 0.0
        if self.how is How.NIXL:
            return self.moved_bytes(executions) / (nodes * self.link)
        return self.again(executions, nodes)

    def again(self, executions: int, nodes: int) -> float:
        """Seconds that each waits if its context is computed again, as after a death, under any strategy; 0 where `prefill` is unknown."""
        return executions * self.context / (nodes * self.prefill) if self.prefill else 0.0

    def longer(self, executions: int, nodes: int) -> float:
        """Seconds that the transfer takes longer."""
        return self.wait(executions, nodes) if self.how is How.NIXL else 0.0

    def words(self) -> str:
        """One line."""
        rate = (
            f"{self.kv_bytes:g} B each over {self.link / GIGA:g} GB/s a node"
            if self.how is How.NIXL
            else f"{self.prefill:g} a second a node"
        )
        return f"{self.how.value} of {self.context:g} tokens an execution, {rate}"


NO_HAND_OVER = HandOver()


def hand_over(how: How | None, context: float, kv_bytes: float, link: float, prefill: float) -> HandOver:
    """From the options (0: not given; `link` in GB/s). ConfigError for one that is missing, or would have no effect."""
    if how is None:
        if context or kv_bytes or link or prefill:
            raise ConfigError("what a hand-over costs is given, but not how it is done", "give --handover nixl or recompute")
        return NO_HAND_OVER
    needed = {"--context-tokens": context}
    needed |= {"--kv-bytes": kv_bytes, "--link": link} if how is How.NIXL else {"--prefill": prefill}
    missing = [option for option, value in needed.items() if not value]
    if missing:
        raise ConfigError(f"--handover {how.value} needs numbers", f"give {', '.join(missing)}")
    return HandOver(how, context, kv_bytes, link * GIGA, prefill)
