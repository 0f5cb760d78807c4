"""The strategy `nixl`: vLLM's own prefill/decode disaggregation between two servers, over NIXL (UCX: RDMA, shared memory or TCP).

Every engine is source and destination alike (`kv_consumer` works in both directions; `kv_both` is deprecated). A pin is a call of one
token at the source that asks for remote decode: it finds the prompt in the prefix cache and keeps its blocks. A call in flight can't be
pinned as it is: aborted calls aren't, so it is cancelled first.
Traps of vLLM 0.32.0 that shaped this: a pull after the source's lease, with another prompt, or under other weights is answered with wrong
tokens (handover.py); a pin that nobody pulls holds up `/pause` and `/reset_prefix_cache` until its lease ends, hence `unpin`; blocks of
16 tokens fail on a CPU.
NIXL's side channel has no secret: it belongs on a network where only the job's nodes are, as MPI does.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from gyre_hpc.engines import vllm_guard
from gyre_hpc.engines.handover import Counters, Gone
from gyre_hpc.engines.prompt import request_json
from gyre_hpc.engines.protocol import Doubt, EngineAddress, EngineFault, Ticket
from gyre_hpc.errors import ConfigError

LEASE = 60
"""Seconds that a source keeps a pin which nobody pulls."""
PATIENCE = 20.0
"""Our deadline, seconds: what is pulled later is not believed. A third of the lease: a cancelled call has long left by then."""
SMALLEST_BLOCK = 32
"""Tokens; of a KV block on a CPU."""
_OPTION = "kv-transfer-config"
_UNPIN_TRIES = 10
_UNPIN_PAUSE = 0.05
_DYING = 5.0
"""Seconds within which a server that was killed refuses connections."""
_SOURCES = {"local_compute": "computed", "local_cache_hit": "cached", "external_kv_transfer": "pulled"}


def options(given: Mapping[str, object], cpu: bool) -> dict[str, object]:
    """What the server's command line needs beside the options `given`. Raises ConfigError."""
    if _OPTION in given:
        raise ConfigError(f"rollout.options.{_OPTION} with rollout.handover = nixl", "take one of the two out")
    block = given.get("block-size", SMALLEST_BLOCK)
    if cpu and (not isinstance(block, int) or block < SMALLEST_BLOCK):
        raise ConfigError(f"rollout.options.block_size = {block} with rollout.handover = nixl", f"{SMALLEST_BLOCK} or more on a CPU")
    extra: dict[str, object] = {"kv_lease_duration": LEASE}
    if cpu:
        extra["num_threads"] = 0  # vLLM's 4 are for network cards; here they only take turns on few cores
    transfer = {
        "kv_connector": "PacedNixlConnector",
        "kv_connector_module_path": "gyre_hpc.engines.handover_connector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return {_OPTION: transfer, **({"block-size": block} if cpu else {})}


def environment(host: str, port: int) -> dict[str, str]:
    """Where the server's side channel listens."""
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}


class Ended(float):
    """The end of a lease, long ago, that no heartbeat moves: vLLM takes `max(old, new)`, and this is never the smaller one.

    A heartbeat of the destination that lay unread (the source stood still, the destination is dead by now) gave an ended lease its whole
    length again, and the source's pause waited for it.
    """

    def __lt__(self, other: float) -> bool:
        return False


class NixlLink:
    """A `KvLink` over the routes of one vLLM server."""

    def __init__(self, address: EngineAddress, patience: float = PATIENCE) -> None:
        self.patience = patience
        self._url = address.url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
            timeout=aiohttp.ClientTimeout(total=patience, sock_connect=5.0),
            headers={"Content-Type": "application/json"},
        )
        self._block = 0

    async def pin(self, tokens: Sequence[int]) -> Ticket:
        asked = time.monotonic()
        sampling = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        body = request_json(
            "token_ids",
            tokens,
            {"sampling_params": sampling, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}},
        )
        headers, data = await self._ask("POST", "inference/v1/generate", body)
        params = orjson.loads(data).get("kv_transfer_params")
        if not params or not params.get("remote_block_ids") or not params.get("do_remote_prefill"):
            raise Doubt("pin", "the source pinned nothing")
        ticket = Ticket(tokens, int(headers[vllm_guard.HEADER]), asked + self.patience, params)
        if params.get("remote_num_tokens") != len(tokens):  # hybrid models pin one less; their state is not ours to vouch for
            await self.unpin(ticket)
            raise Doubt("length", f"the source pinned {params.get('remote_num_tokens')} of {len(tokens)} tokens")
        return ticket

    async def unpin(self, ticket: Ticket) -> None:
        """The worker hears of a pin with the engine's next pass, so this may come before."""
        body = orjson.dumps({"method": "gyre_unpin", "args": [ticket.params["remote_request_id"]], "timeout": self.patience})
        for _ in range(_UNPIN_TRIES):
            _, data = await self._ask("POST", "collective_rpc", body)
            if any(orjson.loads(data)["results"]):
                return
            await asyncio.sleep(_UNPIN_PAUSE)

    async def forget(self) -> None:
        """A connection that breaks says nothing about the server: kept from before, or taken by one that is dying. It is asked again."""
        until = time.monotonic() + _DYING
        while True:
            try:
                await self._ask("POST", "gyre/forget", b"{}")
                return
            except EngineFault as fault:
                broken = isinstance(fault.__cause__, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
                if not broken or isinstance(fault, Gone) or time.monotonic() > until:
                    raise
            await asyncio.sleep(_UNPIN_PAUSE)

    async def counters(self) -> Counters:
        return read_counters((await self._ask("GET", "metrics"))[1].decode())

    async def block(self) -> int:
        if not self._block:
            self._block = read_block((await self._ask("GET", "metrics"))[1].decode())
        return self._block

    async def close(self) -> None:
        await self._session.close()

    async def _ask(self, method: str, name: str, body: bytes | None = None) -> tuple[Mapping[str, str], bytes]:
        if self._session.closed:
            raise EngineFault("this engine's route was taken away")
        try:
            async with self._session.request(method, f"{self._url}/{name}", data=body) as response:
                data = await response.read()
                if response.status != 200:
                    raise EngineFault(f"vLLM answered {response.status} to {name}: {data[:300].decode(errors='replace')}")
                return response.headers, data
        except aiohttp.ClientConnectorError as error:
            kind = Gone if isinstance(error.os_error, ConnectionRefusedError) else EngineFault
            raise kind(f"vLLM did not answer {name}: {error}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFault(f"vLLM did not answer {name}: {type(error).__name__} {error}") from error


def read_counters(text: str) -> Counters:
    """Of vLLM's metrics in Prometheus' text form, all engine cores together."""
    found = {"computed": 0.0, "cached": 0.0, "pulled": 0.0, "bytes": 0.0}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("vllm:prompt_tokens_by_source_total"):
            for source, ours in _SOURCES.items():
                if f'source="{source}"' in name:
                    found[ours] += float(value)
        elif name.startswith("vllm:nixl_bytes_transferred_sum"):
            found["bytes"] += float(value)
    return Counters(**{name: int(value) for name, value in found.items()})


def read_block(text: str) -> int:
    """Tokens of a KV block, from vLLM's metrics in Prometheus' text form. Raises EngineFault."""
    found = re.search(r'^vllm:cache_config_info\{(?:.*,)?block_size="(\d+)"', text, re.MULTILINE)
    if found is None:
        raise EngineFault("vLLM's metrics do not tell its block size (vllm:cache_config_info)")
    return int(found[1])


def pull_fields(ticket: Ticket) -> dict[str, Any]:
    """What a pulling call's body carries."""
    return {"kv_transfer_params": dict(ticket.params)}
