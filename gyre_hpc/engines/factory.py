"""From a kind ("torch", "vllm") to its server handle and client, and from a way of handing over KV to its link; the only place that knows
all of them."""

from __future__ import annotations

from gyre_hpc.engines.handover import KvLink
from gyre_hpc.engines.protocol import NIXL, EngineAddress, EngineClient, EngineServer, EngineSpec
from gyre_hpc.errors import ConfigError


def start_engine(spec: EngineSpec, deadline: float) -> EngineServer:
    """Start an engine process and wait (seconds) until it serves. Raises EngineFault, ConfigError."""
    if spec.kind == "torch":
        from gyre_hpc.engines.torch_engine import TorchEngine

        return TorchEngine(spec, deadline)
    if spec.kind == "vllm":
        from gyre_hpc.engines.vllm_engine import VllmEngine

        return VllmEngine(spec, deadline)
    raise ConfigError(f"rollout.engine = {spec.kind!r}", "torch or vllm")


def connect(address: EngineAddress) -> EngineClient:
    """A client of a running engine; call it inside the event loop that uses it."""
    if address.kind == "torch":
        from gyre_hpc.engines.torch_engine import TorchClient

        return TorchClient(address)
    if address.kind == "vllm":
        from gyre_hpc.engines.vllm_client import VllmClient

        return VllmClient(address)
    raise ConfigError(f"engine kind {address.kind!r}", "torch or vllm")


def link(address: EngineAddress) -> KvLink | None:
    """The hand-over side of an engine; None: it can only recompute. Call it inside the event loop that uses it."""
    if address.handover == NIXL:
        from gyre_hpc.engines.handover_nixl import NixlLink

        return NixlLink(address)
    return None
