"""The trainer's end of vLLM's own weight transfer: its `nccl` and `ipc` backends, led over our lines (weight_meeting.py).

A `Circle` is vLLM's client, so that vLLM's code decides what is said and when, and what it packs. Weights go to the device one by one, as
they are asked for: of a core whose state is on the host only two buckets are on its GPU at a time.
"""

from __future__ import annotations

import base64
import pickle
import socket
from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from gyre_hpc.engines.vllm_transfer import abort_communicator
from gyre_hpc.engines.weight_meeting import Circle
from gyre_hpc.engines.weight_stream import Weights

BUCKET = 256 << 20
"""Bytes of a bucket; vLLM has two under way."""


class Source(WeightSource):
    """Ours, as vLLM wants them."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._weights]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            yield name, tensor.to(torch.accelerator.current_device_index())


class NcclSender:
    """Rank 0 of an NCCL communicator; its members are on GPUs of their own."""

    def __init__(self, circle: Circle) -> None:
        """Raises Lost where a member fails; a member that dies in the rendezvous itself leaves the thread there for vLLM's 300 s."""
        address = circle.address
        with socket.create_server((address, 0)) as free:
            port = free.getsockname()[1]
        world = len(circle.lines) + 1
        info = NCCLTrainerInitInfo(
            rank=0, master_address=address, master_port=port, world_size=world, packed=True, packed_buffer_size_bytes=BUCKET
        )
        self._engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=circle, source=Source(()))
        group = self._engine.model_update_group
        if group is None or group.disabled:
            raise RuntimeError("vLLM found no NCCL library")

    def send(self, circle: Circle, weights: Weights) -> None:
        self._engine.client, self._engine.source = circle, Source(weights)
        self._engine.send_weights()
        if self._engine.model_update_group is None:
            raise RuntimeError("the communicator was aborted")

    def abort(self) -> None:
        group, self._engine.model_update_group = self._engine.model_update_group, None
        abort_communicator(group)


class IpcSender:
    """To workers on this process's own GPU."""

    def __init__(self, circle: Circle) -> None:
        circle.init_weight_transfer_engine({"packed": True})

    def send(self, circle: Circle, weights: Weights) -> None:
        largest = max((tensor.nbytes for _, tensor in weights), default=0)
        _Alone(client=_Pickled(circle), source=Source(weights), packed=True, packed_buffer_size_bytes=max(BUCKET, largest)).send_weights()

    def abort(self) -> None:
        """Nothing to leave: each bucket is a question of its own, which the circle ends."""


class _Alone(IPCTrainerWeightTransferEngine):
    """vLLM's gathers the handles of all ranks of torch's default world, which is the core's: here the leader alone sends."""

    init_info_cls = IPCTrainerInitInfo

    def _all_gather_and_merge_handles(self, handles: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return handles

    @staticmethod
    def _post_send_sync() -> None:
        torch.cuda.ipc_collect()


class _Pickled:
    """A circle that can say CUDA handles, which are no JSON."""

    def __init__(self, circle: Circle) -> None:
        self._circle = circle
        self.init_weight_transfer_engine = circle.init_weight_transfer_engine
        self.start_weight_update = circle.start_weight_update
        self.finish_weight_update = circle.finish_weight_update

    def update_weights(self, update_info: Any) -> None:
        rest = {name: value for name, value in update_info.items() if name not in ("ipc_handles", "ipc_handles_pickled")}
        self._circle.update_weights({**rest, "handles": base64.b64encode(pickle.dumps(update_info["ipc_handles"])).decode()})
