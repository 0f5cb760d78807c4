"""vLLM's own weight transfer inside its worker processes: `nccl` and `ipc` on GPUs as they come, and a `gloo` backend of ours on CPUs.

vLLM's transfer engines load what they receive into the live model, layer by layer, so from `start` to `finish` a worker is half new. What
is taken from vLLM is the engines, without its worker's sessions: a transfer that breaks leaves a session behind that refuses the next one.
Invariants: after `undo` the layers are such that a load from files finds them all (a layer that has some of its weights already would
otherwise take the rest of them for all); a communicator that is aborted says nothing and loads what was in memory before, so `update` asks
whether it was.
"""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.platforms import current_platform

from gyre_hpc.engines import weight_groups
from gyre_hpc.engines.weight_meeting import Member

GLOO, NCCL, IPC = weight_groups.GLOO, "nccl", "ipc"
_NAMES = {GLOO: "gyre_gloo", NCCL: "nccl", IPC: "ipc"}
"""In vLLM's register."""


@dataclass(kw_only=True)
class GlooInitInfo(NCCLWeightTransferInitInfo):
    """As for NCCL; `address`: this worker's, `seconds` for each broadcast, `bucket` bytes."""

    address: str
    seconds: float
    bucket: int


class GlooWeightTransferEngine(NCCLWeightTransferEngine):
    """vLLM's NCCL engine with a gloo group in place of the communicator, and without a device to wait for."""

    init_info_cls: type[Any] = GlooInitInfo
    model_update_group: Any

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        assert isinstance(init_info, GlooInitInfo)
        parallel = self.parallel_config
        self.model_update_group = weight_groups.join(vars(init_info), worker_number(parallel), init_info.address)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        expected = weight_groups.metas(vars(update_info))
        model: Any = self.model
        with disable_mtp_completeness_check():
            for bucket in weight_groups.receive(self.model_update_group, expected):
                model.load_weights([(name, tensor.to(self.device)) for name, tensor in bucket])

    def shutdown(self) -> None:
        group, self.model_update_group = self.model_update_group, None
        if group is not None:
            group.abort()


if _NAMES[GLOO] not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(_NAMES[GLOO], GlooWeightTransferEngine)


def worker_number(parallel: Any) -> int:
    """A worker's place in its engine, as vLLM's NCCL backend counts it."""
    return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)


class VllmReceiver:
    """A `Receiver` (weight_member.py) for one of vLLM's workers, made once."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._engines: dict[str, Any] = {}
        self._groups: dict[str, str] = {}
        self._backend = ""
        self._aborted = False
        self.half = False
        """Whether the model may be of two versions, or of one that its engine was not told of; WorkerExtension ends that."""

    def member(self, engine: str, seconds: float) -> Member:
        parallel = self._worker.vllm_config.parallel_config
        workers = parallel.world_size * parallel.data_parallel_size
        backends: tuple[str, ...] = (GLOO,)
        device = ""
        if current_platform.is_cuda_alike():  # other accelerators get the weights as a CPU does, and take them to their device
            backends, device = (NCCL, IPC), str(torch.cuda.get_device_properties(self._worker.device).uuid)
        if parallel.data_parallel_size > 1:
            backends = ()  # vLLM hands on what the workers of its first core say: of the others nobody would know who is half new
        return Member(engine, worker_number(parallel), workers, backends, seconds, device, tuple(self._groups.values()))

    def enter(self, backend: str, group: str, info: dict[str, Any], address: str) -> None:
        self._aborted, self._backend = False, backend
        engine = self._engine(backend)
        self._groups.pop(backend, None)
        engine.shutdown()
        engine.init_transfer_engine(engine.parse_init_info({**info, "address": address} if backend == GLOO else info))
        if backend == NCCL and engine.model_update_group.disabled:
            raise RuntimeError("vLLM found no NCCL library: its communicator would do nothing, and say nothing")
        self._groups[backend] = group

    def start(self, backend: str) -> None:
        self._aborted, self._backend = False, backend
        self.half = True
        with self._config():
            self._engine(backend).start_weight_update()

    def update(self, info: dict[str, Any]) -> None:
        if self._backend == IPC:  # handles of the core's leader, to whom our owner sent us
            info = {**info, "ipc_handles": pickle.loads(base64.b64decode(info["handles"]))}
            del info["handles"]
        with self._config():
            self._engine(self._backend).update_weights(info)
        if self._aborted:
            raise RuntimeError("the communicator was aborted")

    def finish(self) -> None:
        self.undo()
        runner = self._worker.model_runner  # as its own reload has it
        runner.reset_lora_state()
        runner.reset_encoder_cache()
        runner.reset_mm_cache()

    def undo(self) -> None:
        """All layers take what they have got so far; then they may be loaded anew."""
        with self._config():
            self._engine(self._backend).finish_weight_update()

    def abort(self) -> None:
        self._aborted = True
        self._groups.pop(self._backend, None)
        engine = self._engines.get(self._backend)
        if self._backend == NCCL and engine is not None:
            abort_communicator(engine.model_update_group)
            engine.model_update_group = None
        elif engine is not None:
            engine.shutdown()

    def _engine(self, backend: str) -> Any:
        if backend not in self._engines:
            worker = self._worker
            config = WeightTransferConfig(backend=_NAMES[backend])
            made = WeightTransferEngineFactory.create_engine(config, worker.vllm_config, worker.device, worker.model_runner.get_model())
            self._engines[backend] = made
        return self._engines[backend]

    @contextmanager
    def _config(self) -> Iterator[None]:
        with set_current_vllm_config(self._worker.vllm_config):
            yield


def abort_communicator(communicator: Any) -> None:
    """From another thread than the one that is in a collective of vLLM's PyNcclCommunicator: that ends, what it received is void.

    `disabled` comes first: the other thread goes on at once, and must not hand the next bucket to a communicator that is gone. It has its
    own moment to get past that look, hence the pause. Blocks for as long as NCCL does (its watchdogs in torch abort in the same way).
    """
    if communicator is None or communicator.disabled:
        return
    communicator.disabled = True
    time.sleep(_PAUSE)
    with torch.accelerator.device_index(communicator.device.index):
        communicator.nccl.ncclCommAbort(communicator.comm)


_PAUSE = 0.05
