"""What we say to vLLM's own weight transfer is what the installed vLLM takes: its trainer classes run here, with no GPU below them.

In place of the device stand fakes of the communicator and of the two functions that need CUDA streams or handles; what NCCL and CUDA IPC do
themselves is not tested anywhere (docs/configuration.md says so).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gyre_hpc.engines.vllm_worker import WorkerExtension
from gyre_hpc.engines.weight_meeting import Member
from tests.engines.hand_leader import leader

pytestmark = pytest.mark.vllm

WEIGHTS = [("a", torch.arange(6.0).reshape(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16))]


class FakeCommunicator:
    """In place of vLLM's PyNcclCommunicator."""

    def __init__(self) -> None:
        self.disabled = False
        self.sent: list[torch.Tensor] = []
        self.told: list[str] = []
        self.device, self.comm = SimpleNamespace(index=0), "comm"
        self.nccl = SimpleNamespace(ncclCommAbort=lambda comm: self.told.append(f"abort {comm} disabled={self.disabled}"))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        assert src == 0
        self.sent.append(tensor)


class Heard:
    """In place of a `Circle`: keeps what the trainer side says."""

    def __init__(self) -> None:
        self.lines, self.address = [None, None], "127.0.0.1"
        self.said: list[tuple[str, Any]] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.said.append(("init", init_info))

    def start_weight_update(self) -> None:
        self.said.append(("start", None))

    def update_weights(self, update_info: Any) -> None:
        self.said.append(("update", update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.said.append(("finish", None))


@pytest.fixture
def communicator(monkeypatch: pytest.MonkeyPatch) -> FakeCommunicator:
    from vllm.distributed.weight_transfer import nccl_engine

    made = FakeCommunicator()

    def produce(iterator: Any, group: Any, src: int, post_iter_func: Any, buffer_size_bytes: int, num_buffers: int) -> None:
        for item in iterator:
            group.broadcast(post_iter_func(item), src=src)

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda init_info: made)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", produce)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: "cpu")
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
    return made


def test_over_nccl_vllms_trainer_side_says_what_its_workers_parse(communicator: FakeCommunicator) -> None:
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    from gyre_hpc.engines.vllm_senders import BUCKET, NcclSender

    circle = Heard()
    sender = NcclSender(circle)  # type: ignore[arg-type]
    ((word, told),) = circle.said
    info = NCCLWeightTransferInitInfo(**told)
    assert (word, info.world_size, info.rank_offset, info.packed, info.packed_buffer_size_bytes) == ("init", 3, 1, True, BUCKET)
    again = Heard()
    sender.send(again, WEIGHTS)  # type: ignore[arg-type]
    assert [word for word, _ in again.said] == ["start", "update", "finish"]
    update = NCCLWeightTransferUpdateInfo(**again.said[1][1])
    assert (update.names, update.dtype_names, update.shapes) == (["a", "b"], ["float32", "bfloat16"], [[2, 3], [4]])
    assert all(torch.equal(sent, tensor) for sent, (_, tensor) in zip(communicator.sent, WEIGHTS, strict=True))


def test_an_abort_stops_further_buckets_first_and_comes_once(communicator: FakeCommunicator) -> None:
    from gyre_hpc.engines.vllm_senders import NcclSender

    sender = NcclSender(Heard())  # type: ignore[arg-type]
    sender.abort()
    sender.abort()
    assert communicator.told == ["abort comm disabled=True"]


def test_without_a_library_of_nccl_nothing_is_sent(communicator: FakeCommunicator) -> None:
    from gyre_hpc.engines.vllm_senders import NcclSender

    communicator.disabled = True
    with pytest.raises(RuntimeError, match="no NCCL library"):
        NcclSender(Heard())  # type: ignore[arg-type]


def test_over_ipc_handles_come_through_and_nobody_else_s_world_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import ipc_engine
    from vllm.distributed.weight_transfer.packed_tensor import PackedIpcChunk

    from gyre_hpc.engines.vllm_senders import IpcSender
    from gyre_hpc.engines.vllm_transfer import VllmReceiver

    def produce(iterator: Any, gpu_uuid: str, post_iter_func: Any, buffer_size_bytes: int) -> Iterator[PackedIpcChunk]:
        for name, tensor in iterator:
            handle = (torch.Tensor, tuple(tensor.shape), b"\x00\xff", tensor.dtype)
            yield PackedIpcChunk([name], [list(tensor.shape)], [str(tensor.dtype)[6:]], [tensor.nbytes], {gpu_uuid: handle})

    monkeypatch.setattr(ipc_engine, "packed_ipc_producer", produce)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-0"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    circle = Heard()
    IpcSender(circle).send(circle, WEIGHTS)  # type: ignore[arg-type]
    assert [word for word, _ in circle.said] == ["init", "start", "update", "update", "finish"]
    assert ipc_engine.IPCWeightTransferInitInfo(**circle.said[0][1]).packed

    taken: list[Any] = []
    receiver = VllmReceiver(SimpleNamespace(vllm_config=None))
    receiver._backend = "ipc"
    receiver._engines["ipc"] = SimpleNamespace(update_weights=lambda info: taken.append(ipc_engine.IPCWeightTransferUpdateInfo(**info)))
    monkeypatch.setattr(receiver, "_config", nullcontext)
    for word, told in circle.said:
        if word == "update":
            receiver.update(told)
    assert [(update.names, update.tensor_sizes) for update in taken] == [(["a"], [24]), (["b"], [8])]
    assert taken[1].ipc_handles == {"GPU-0": (torch.Tensor, (4,), b"\x00\xff", torch.bfloat16)}


def test_a_worker_that_is_taken_out_while_it_finishes_has_weights_that_its_engine_must_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    from gyre_hpc.engines.vllm_transfer import VllmReceiver

    finishing, taken_out, done = threading.Event(), threading.Event(), []

    def reset() -> None:
        finishing.set()
        assert taken_out.wait(60)

    worker = WorkerExtension()
    model = SimpleNamespace(modules=lambda: ())
    resets = dict.fromkeys(("reset_encoder_cache", "reset_mm_cache"), lambda: None)
    worker.model_runner = SimpleNamespace(reset_lora_state=reset, get_model=lambda: model, **resets)
    worker._gyre_receiver = receiver = VllmReceiver(worker)
    monkeypatch.setattr(receiver, "member", lambda engine, seconds: Member(engine, 0, 1, ("gloo",), seconds))
    monkeypatch.setattr(receiver, "_config", nullcontext)
    receiver._engines["gloo"] = SimpleNamespace(
        start_weight_update=lambda: None, finish_weight_update=lambda: done.append("finish"), shutdown=taken_out.set
    )
    start, finish = {"do": "start", "backend": "gloo"}, {"do": "finish"}
    with leader(start, finish, {"do": "end", "why": "the offer was withdrawn"}, interrupts=finishing) as source:
        assert worker.gyre_attend_weights(source, 1, 20.0, "a") == {"failed": "the offer was withdrawn", "half": True}
    assert done == ["finish", "finish"], "all layers can be loaded"
    with leader(start, finish, {"do": "end", "why": ""}) as source:
        assert worker.gyre_attend_weights(source, 2, 20.0, "a") == {}
    assert not receiver.half


@pytest.mark.parametrize(("cores", "backends"), [(1, ("gloo",)), (2, ())])
def test_an_engine_of_several_cores_takes_part_in_no_broadcast(cores: int, backends: tuple[str, ...]) -> None:
    """vLLM's `collective_rpc` answers for the first of them alone (0.32.0, DPLBAsyncMPClient.call_utility_async)."""
    from gyre_hpc.engines.vllm_transfer import VllmReceiver

    parallel = SimpleNamespace(world_size=2, data_parallel_size=cores, data_parallel_index=cores - 1, rank=1)
    worker = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
    assert VllmReceiver(worker).member("a", 5.0) == Member("a", 2 * cores - 1, 2 * cores, backends, 5.0)
