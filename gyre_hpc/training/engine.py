"""The optimizer of the core cell: a DeepSpeed ZeRO-1/2 engine that is handed finished gradients.

Invariants
- A finished gradient g enters once per step as `backward(sum of p * g)`: DeepSpeed's own reduction averages over the core's ranks, and as
  every rank hands in the same g the average is g. No factor of a world size appears anywhere.
- Nothing is compiled on a CPU: the optimizer is torch's AdamW, passed in, and DeepSpeed's shared-memory collectives, which only its
  inference uses, are switched off. So a first step takes no minutes and needs no compiler; gloo carries everything.
- Master weights and moments are float32 whatever `model.dtype` is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gyre_hpc.config import Config
from gyre_hpc.errors import ConfigError, GyreError
from gyre_hpc.importing import uncollected
from gyre_hpc.training.settings import deepspeed_settings
from gyre_hpc.training.world import Seat, join, leave

Table = list[tuple[str, int, int, int]]
"""Where parameters are in the padded flat vector of a group: (name, group, offset, length)."""


def import_deepspeed() -> Any:
    """Import DeepSpeed without its chatter, and without letting it look for MPI."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # DeepSpeed calls what torch will rename
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.jit")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    with uncollected():
        import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """DeepSpeed prints; standard output may belong to somebody's parser."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


class Zero:
    """Steps `parameters` of `model`, in place, on every rank of the core cell. The constructor and `step` are collective."""

    def __init__(
        self,
        model: Any,
        parameters: Sequence[torch.nn.Parameter],
        config: Config,
        rank: int,
        world: int,
        master: str,
        device: torch.device,
    ) -> None:
        settings = deepspeed_settings(config)
        training = config.training
        self.parameters = list(parameters)
        self._names = [name for name, _ in model.named_parameters()]
        self.device = device
        with stdout_to_stderr():
            deepspeed = import_deepspeed()
            os.environ["LOCAL_RANK"] = str(device.index or 0)
            backend = "nccl" if device.type == "cuda" else "gloo"
            join(Seat(rank, world, master), backend, config.deadlines.start)
            deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)  # neither MPI nor a launcher's variables
            optimizer = torch.optim.AdamW(self.parameters, lr=training.lr, betas=training.betas, weight_decay=training.weight_decay)
            self.engine, self.zero, _, _ = deepspeed.initialize(
                model=model, model_parameters=self.parameters, optimizer=optimizer, config=settings, dist_init_required=False
            )
        model.eval()  # the engine must not switch dropout on

    def step(self, gradient: Sequence[torch.Tensor], lr: float) -> float:
        """AdamW with `gradient` (one tensor per parameter, the same on every rank), clipped. Returns the norm before clipping."""
        for group in self.zero.optimizer.param_groups:
            group["lr"] = lr
        carrier = torch.stack([(p * g.to(p.dtype)).sum().float() for p, g in zip(self.parameters, gradient, strict=True)]).sum()
        self.engine.backward(carrier)
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        if norm is None:
            raise GyreError("DeepSpeed gave no gradient norm", "remove what training.deepspeed changes about gradients")
        return float(norm)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """This rank's shard: `master/<group>` float32 and `optimizer/<group>/<name>`; views of live memory on a CPU."""
        out: dict[str, NDArray[Any]] = {}
        for g, master in enumerate(self.zero.single_partition_of_fp32_groups):
            out[f"master/{g}"] = master.detach().cpu().numpy()
            for name, value in self.zero.optimizer.state[master].items():
                out[f"optimizer/{g}/{name}"] = np.atleast_1d(torch.as_tensor(value).detach().cpu().numpy())
        return out

    def load_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Undo `arrays`, and give the new weights to the model (collective). Raises ConfigError for shards of other lengths."""
        for g, master in enumerate(self.zero.single_partition_of_fp32_groups):
            saved = arrays.get(f"master/{g}")
            length = 0 if saved is None else len(saved)
            if saved is None or length != master.numel():
                raise ConfigError(
                    f"the checkpoint's shard {g} has {length} weights, this core rank's has {master.numel()}",
                    "resume with the checkpoint's cells.* and training.deepspeed",
                )
            with torch.no_grad():
                master.copy_(torch.from_numpy(saved))
            prefix = f"optimizer/{g}/"
            state = self.zero.optimizer.state[master]
            state.clear()
            for key, value in arrays.items():
                if key.startswith(prefix):
                    state[key.removeprefix(prefix)] = self._restored(value, master)
        self.zero.update_lp_params()

    def _restored(self, value: NDArray[Any], master: torch.Tensor) -> torch.Tensor:
        tensor = torch.from_numpy(value.copy())
        return tensor.to(master.device) if tensor.shape == master.shape else tensor.reshape(())

    def table(self) -> Table:
        """Names and places of the parameters in the concatenation of all ranks' `master/<group>` shards."""
        names = {id(p): name for name, p in zip(self._names, self.parameters, strict=True)}
        return [
            (names[id(p)], g, offset, p.numel())
            for g, (params, offsets) in enumerate(zip(self.zero.round_robin_bit16_groups, self.zero.round_robin_bit16_offsets, strict=True))
            for p, offset in zip(params, offsets, strict=True)
        ]

    def offload(self) -> None:
        self.engine.offload_states()

    def onload(self) -> None:
        self.engine.reload_states()

    def close(self) -> None:
        """Leave the core's world. Collective on NCCL, local on gloo."""
        self.engine.destroy()
        leave()
