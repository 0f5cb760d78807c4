"""The core's newest weights, offered from its memory while a publication is under way: streamed to each engine that asks
(gyre_hpc/engines/weight_stream.py), or broadcast to all at once (weight_broadcast.py).

Invariant: at most one version is offered, and none while a step may change the weights: the core withdraws before every step, and what has
not arrived by then never does. An offer that can't be made is no failure: the same weights lie in files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gyre_hpc.engines.protocol import NotReceived

if TYPE_CHECKING:
    import torch

    from gyre_hpc.engines.weight_broadcast import Broadcaster
    from gyre_hpc.engines.weight_stream import Sender, Weights

logger = logging.getLogger(__name__)
_MEETING = 8
"""Times the patience for those who come after the first: as long as a meeting may take altogether, whoever comes."""


class Offer:
    """Of the core's leader; everybody else has an empty one."""

    def __init__(self) -> None:
        self._sender: Sender | None = None
        self._broadcaster: Broadcaster | None = None
        self._broadcasts = False

    def open(self, host: str, version: int, weights: Callable[[], Weights], copied: int = 0) -> str:
        """Offer what `weights` gives as a stream, in place of an older offer; the source to be told to engines, "" where it can't be done.

        `copied`: bytes of host memory that `weights` takes; where that much is not free it is not asked.
        """
        from gyre_hpc.engines.weight_stream import Sender

        def begin(given: Weights) -> str:
            self._sender = Sender(host, version, given)
            return self._sender.source

        return self._open(version, weights, copied, begin)

    def broadcast(
        self,
        host: str,
        version: int,
        weights: Callable[[], Weights],
        copied: int,
        device: torch.device,
        engines: int,
        patience: float,
    ) -> str:
        """The same as a broadcast to `engines` engines, or those that come within `patience` seconds; `device`: the leader's own."""
        from gyre_hpc.engines.weight_broadcast import Broadcaster

        def begin(given: Weights) -> str:
            self._broadcaster = self._broadcaster or Broadcaster(device)
            source = self._broadcaster.offer(host, version, given, engines, patience, _MEETING * patience)
            self._broadcasts = True
            return source

        return self._open(version, weights, copied, begin)

    def has_room(self, version: int, wanted: int) -> bool:
        """Whether `wanted` bytes of host memory are free now that nothing is offered any more; says so where they are not."""
        from gyre_hpc.engines.weight_stream import require_room

        self.close()
        try:
            require_room(wanted)
        except NotReceived as error:
            logger.warning("version %d can't be sent from memory, engines load it from files: %s", version, error)
            return False
        return True

    def _open(self, version: int, weights: Callable[[], Weights], copied: int, begin: Callable[[Weights], str]) -> str:
        from gyre_hpc.engines.weight_stream import require_room

        self.close()
        try:
            require_room(copied)
            return begin(weights())
        except (NotReceived, OSError, RuntimeError) as error:  # torch's word for no memory is a RuntimeError
            logger.warning("version %d can't be sent from memory, engines load it from files: %s", version, error)
            return ""

    def close(self) -> dict[str, Any]:
        """Withdraw; what was sent, as the fields of `Sent`, {} if nothing was offered."""
        if self._sender is not None:
            sent, self._sender = self._sender.close(), None
        elif self._broadcasts and self._broadcaster is not None:
            sent, self._broadcasts = self._broadcaster.withdraw(), False
        else:
            return {}
        logger.info("sent %d bytes of weights to %d workers of engines in %.3f s", sent.bytes, sent.receivers, sent.seconds)
        return asdict(sent)

    def end(self) -> None:
        """Withdraw, and leave the groups that are kept between broadcasts."""
        self.close()
        if self._broadcaster is not None:
            self._broadcaster.close()
            self._broadcaster = None
