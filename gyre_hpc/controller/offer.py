"""The core's newest weights, offered from its memory while a publication is under way (gyre_hpc/engines/weight_stream.py).

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
    from gyre_hpc.engines.weight_stream import Sender, Weights

logger = logging.getLogger(__name__)


class Offer:
    """Of the core's leader; everybody else has an empty one."""

    def __init__(self) -> None:
        self._sender: Sender | None = None

    def open(self, host: str, version: int, weights: Callable[[], Weights], copied: int = 0) -> str:
        """Offer what `weights` gives, in place of an older offer; the source to be told to engines, "" where it can't be done.

        `copied`: bytes of host memory that `weights` takes; where that much is not free it is not asked.
        """
        from gyre_hpc.engines.weight_stream import Sender, require_room

        self.close()
        try:
            require_room(copied)
            self._sender = Sender(host, version, weights())
        except (NotReceived, OSError, RuntimeError) as error:  # torch's word for no memory is a RuntimeError
            logger.warning("version %d can't be sent from memory, engines load it from files: %s", version, error)
            return ""
        return self._sender.source

    def close(self) -> dict[str, Any]:
        """Withdraw; what was sent, as the fields of `Sent`, {} if nothing was offered."""
        if self._sender is None:
            return {}
        sent, self._sender = self._sender.close(), None
        logger.info("sent %d bytes of weights to %d receivers in %.3f s", sent.bytes, sent.receivers, sent.seconds)
        return asdict(sent)
