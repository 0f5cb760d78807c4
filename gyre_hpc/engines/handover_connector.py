"""vLLM's NIXL connector, fitted to engines that share cores or sleep; it runs inside vLLM's processes (engine core and workers).

- On CPUs: NIXL's progress thread never rests on its own, 80-90 % of a core for an idle engine, which a GPU node has to spare and several
  engines on two cores have not. Its bindings know a pause (`pthrDelay`), its Python front sets it to 0; switched off altogether, pulls hang
  (1.5.1). How engine core and worker wait for each other is mended for every server (vllm_main.py).
- On GPUs (read, never run): sleeping unmaps the KV cache, which NIXL has registered with the network card once and for all; after waking
  the same addresses are other pages, and a pull would read what is not there any more. So the cache lies outside what sleeps, and a
  release gives back the memory of the weights only.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.platforms import current_platform

log = logging.getLogger(__name__)

_PAUSE = 1000
"""Microseconds between two looks of the progress thread."""


class PacedNixlConnector(NixlPullConnector):
    """As `NixlConnector`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with paced() if current_platform.is_cpu() else contextlib.nullcontext():
            super().__init__(*args, **kwargs)
        self._kept: Any = None

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """Where a worker allocates its KV cache."""
        if current_platform.is_cpu():
            return None
        self._kept = torch.cuda.MemPool()
        return torch.cuda.use_mem_pool(self._kept)


@contextlib.contextmanager
def paced() -> Iterator[None]:
    """NIXL agents that are made meanwhile get the pause."""
    from nixl._api import nixl_agent

    bindings: Any = getattr(sys.modules[nixl_agent.__module__], "nixlBind", None)
    make = getattr(bindings, "nixlAgent", None)
    if make is None:
        log.warning("this NIXL can't be paced: its progress thread takes most of a core")
        yield
        return

    def made(name: str, config: Any) -> Any:
        config.pthrDelay = _PAUSE
        return make(name, config)

    bindings.nixlAgent = made
    try:
        yield
    finally:
        bindings.nixlAgent = make
