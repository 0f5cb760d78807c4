"""The trainers of a cell: `Satellite` computes gradients, `Core` computes gradients and owns the weights and the optimizer.

Invariants
- What leaves an actor is a sum: `gradient()` is the unnormalised float32 sum of the rows' gradients since `zero()`; who computed which row
  never matters. `Core.step` divides the sum over all cells by the number of executions, once.
- How a rank holds the model is another module's: the whole of it (whole.py), or one of R shards (sharded.py). All flat vectors are of what
  it holds, float32 in the order of `model.parameters()` (tied weights once), so both sides of an exchange agree without names.
- Weights do not change between steps, so a snapshot pulled while others accumulate is the right one.
- `version` is the number of optimizer steps taken.
- What is collective over a cell's torch.distributed world (world.py): of a core the constructor, `step`, `load_state` and `close`; of a
  sharded cell also `accumulate`, `logprobs`, `canary`, `export`, `weights`. MPI is neither used nor initialised here.

A satellite with whole weights stands outside torch.distributed. On a CPU `offload` and `onload` have nothing to move.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from gyre_hpc.canary import NAME as CANARY
from gyre_hpc.canary import Canary, text
from gyre_hpc.config import Config
from gyre_hpc.durable import replace_directory
from gyre_hpc.errors import ConfigError, GyreError, Resumable
from gyre_hpc.training import loading, needs, world
from gyre_hpc.training.head import target_logprobs
from gyre_hpc.training.loss import Objective, Sums, batch_loss
from gyre_hpc.training.published import published, stream, write_files
from gyre_hpc.training.rows import TrainRow, share, stack
from gyre_hpc.training.settings import sharded, stage
from gyre_hpc.training.whole import Whole
from gyre_hpc.training.world import Seat

if TYPE_CHECKING:
    from gyre_hpc.checkpoint import CoreState
    from gyre_hpc.training.adam import ShardedAdam
    from gyre_hpc.training.engine import Zero
    from gyre_hpc.training.sharded import Sharded

log = logging.getLogger(__name__)

_NOT_COPIED = ("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.h5", "*.gguf", "*.onnx", ".*")
"""Weights in any format, and hidden files (a clone's .git, caches)."""


class Satellite:
    """A model that follows the core's weights and sums gradients over rows.

    `model_dir`: a Hugging Face causal-LM directory; `seat`: this rank's in its cell's world, which a sharded model needs and joins.
    Raises ConfigError where the model can't be loaded or trained.
    """

    def __init__(self, model_dir: Path, config: Config, local_rank: int = 0, seat: Seat | None = None) -> None:
        torch.set_num_threads(config.training.threads)
        self.model_dir = model_dir
        self.config = config
        self.device = torch.device("cuda", local_rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
        self.sharded = sharded(config)
        """Whether this rank holds a shard of the model."""
        self.rank = seat.rank if seat is not None else 0
        self._held = self._hold(seat)
        self.model = self._held.model
        self.size = self._held.size
        """Length of a flat vector of this rank."""
        log.info("this rank holds %d of %d parameters", self.size, self._held.total)
        self.rule = Objective(config.rollout.temperature, config.training.token_cap, config.training.clip_low, config.training.clip_high)

    def _hold(self, seat: Seat | None) -> Whole | Sharded:
        if not self.sharded:
            model = loading.load(self.model_dir, self.config)
            self._require_room(sum(p.numel() for p in model.parameters()))
            return Whole(model, self.device)
        from gyre_hpc.training.sharded import Sharded

        if seat is None:
            raise ValueError("a sharded model needs the seats of a cell")
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.device)
        world.join(seat, "cpu:gloo,cuda:nccl" if on_gpu else "gloo", world.patience(self.config.deadlines))
        return Sharded(self.model_dir, self.config, seat, self.device, self._require_room)

    def _require_room(self, parameters: int) -> None:
        """Raises ConfigError where this rank's device can't hold its part of so many."""
        if self.device.type == "cuda":
            dtype, has = getattr(torch, self.config.model.dtype), torch.cuda.get_device_properties(self.device).total_memory
            needs.require(parameters, self._ranks, stage(self.config), dtype.itemsize, isinstance(self, Core), has)

    @property
    def _ranks(self) -> int:
        """Of each cell."""
        return self.config.cells.nodes_per_cell * self.config.cells.ranks_per_node

    def pull(self, flat: NDArray[np.float32]) -> None:
        """Take the core's weights, float32[size]. Raises ValueError on another length."""
        self._check(flat)
        self._held.rest()
        for part, taken in zip(self._held.parts(), self._held.views(torch.from_numpy(flat)), strict=True):
            part.copy_(taken)

    def snapshot(self) -> NDArray[np.float32]:
        """The weights now, float32[size], a copy."""
        flat = torch.empty(self.size, dtype=torch.float32)
        for part, place in zip(self._held.parts(), self._held.views(flat), strict=True):
            place.copy_(part)
        return flat.numpy()

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Nats of tokens[1:], each after those before it, at temperature 1, by the forward pass that trains. At least two tokens."""
        ids = torch.tensor([list(tokens)], device=self.device)
        at = torch.arange(1, len(tokens), device=self.device)
        with torch.no_grad():
            # in two chunks: a model whose head can't be run so is found out by its first canary, not by its first long row
            logprobs, _ = target_logprobs(self.model, ids, torch.zeros_like(at), at, chunk=max(1, len(at) // 2))
        self._held.rest()
        return [float(value) for value in logprobs]

    def canary(self, version: int) -> Canary:
        """Of the weights now, to be repeated by every engine that gets them."""
        config = self.model.config.get_text_config(decoder=True)
        tokens = text(int(config.vocab_size), self.config.model.window)
        exact = Canary(version, tokens, tuple(self.logprobs(tokens)))
        hook = self.model.get_input_embeddings().register_forward_hook(_one_rounding)
        try:
            return exact.moved(self.logprobs(tokens))
        finally:
            hook.remove()

    def accumulate(self, rows: Sequence[TrainRow]) -> Sums:
        """Add the gradient of these rows to the sum. Any number of rows; memory is bounded by training.tokens_per_microstep, of which a
        rank of a large cell takes its part."""
        total = Sums()
        for batch in self._held.passes(stack(rows, share(self.config.training.tokens_per_microstep, self._ranks))):
            loss, sums = batch_loss(self.model, batch, self.rule, self.device)
            self._held.add(loss)
            if batch.tokens:
                total = total + sums
        return total

    def gradient(self) -> NDArray[np.float32]:
        """The sum of the rows' gradients since `zero`, float32[size], a copy; zeros without any. Of a shard: of all rows of the cell."""
        return self._held.gradient()

    def zero(self) -> None:
        """Forget the sum."""
        self._held.zero()

    def offload(self) -> None:
        """Give the accelerator's memory to the inference engine (the sum of gradients must have been taken). CPU: nothing to do."""
        if self.device.type == "cuda":
            self._held.forget()
            self._to_host()
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Undo `offload`; weights may be stale: pull before accumulating."""
        if self.device.type == "cuda":
            self._to_device()

    def close(self) -> None:
        """Leave the cell's torch.distributed world, if it has one (collective on NCCL)."""
        if self.sharded:
            world.leave()

    def _to_host(self) -> None:
        self._held.to(torch.device("cpu"))

    def _to_device(self) -> None:
        self._held.to(self.device)

    def _check(self, flat: NDArray[np.float32]) -> None:
        if flat.dtype != np.float32 or flat.shape != (self.size,):
            raise ValueError(f"flat vector of {flat.dtype} {flat.shape}, the model has float32 ({self.size},)")


@dataclass(frozen=True)
class StepMetrics:
    """`grad_norm` before clipping; `lr` that was used; `version` after the step."""

    grad_norm: float
    lr: float
    version: int


class Core(Satellite):
    """A satellite that also holds the authoritative weights and, with the other ranks of the core cell, the optimizer: DeepSpeed's ZeRO
    (engine.py) of whole weights, AdamW on its shard (adam.py) of a sharded model.

    `rank` of `world` ranks of the core cell; `master` "host:port" where its rank 0 listens. Raises ConfigError for what can't be trained.
    """

    def __init__(self, model_dir: Path, config: Config, rank: int, world: int, master: str, local_rank: int = 0) -> None:
        super().__init__(model_dir, config, local_rank, Seat(rank, world, master))
        self.world = world
        self.version = 0
        self._optimizer = self._optimize(master)

    def _optimize(self, master: str) -> Zero | ShardedAdam:
        if isinstance(self._held, Whole):
            from gyre_hpc.training.engine import Zero

            return Zero(self.model, self._held.parameters, self.config, self.rank, self.world, master, self.device)
        from gyre_hpc.training.adam import ShardedAdam

        return ShardedAdam(self._held, self.config)

    def pull(self, flat: NDArray[np.float32]) -> None:
        """Refused: the core's weights come from its optimizer, and only `load_state` may replace both."""
        raise ValueError("the core takes no weights from anybody; load_state replaces weights and optimizer together")

    def lr(self, step: int) -> float:
        """Learning rate of step `step` (from 0): linear warm-up, then constant."""
        training = self.config.training
        return training.lr * min(1.0, (step + 1) / training.warmup_steps) if training.warmup_steps else training.lr

    def step(self, gradient: NDArray[np.float32], executions: int) -> StepMetrics:
        """One optimizer step with `gradient` / `executions`; `gradient` is the sum over all cells: the same on every rank of the core cell,
        or its part for the rank's shard.

        Raises GyreError, with the weights unchanged, if it is not finite; ValueError without executions.
        """
        self._check(gradient)
        if executions < 1:
            raise ValueError(f"a step over {executions} executions")
        wrong = int(self._held.over_ranks(float(gradient.size - np.isfinite(gradient).sum())))
        if wrong:
            raise GyreError(
                f"step {self.version + 1}: the gradient has {wrong} values that are not finite",
                "the weights are unchanged; start a new run.dir with a lower training.lr or training.clip_grad, "
                "model.path = the newest folder in RUN/weights goes on from there",
            )
        lr = self.lr(self.version)
        mean = torch.from_numpy(gradient).to(self.device, copy=True).div_(executions)  # one copy on the device, not two
        norm = self._optimizer.step(self._held.views(mean), lr)
        self.version += 1
        return StepMetrics(grad_norm=norm, lr=lr, version=self.version)

    def export(self, directory: Path) -> None:
        """Write the weights as a Hugging Face directory for the engines: whole or absent, durable when this returns. Rank 0 writes.

        Everything but the weights is copied from the model's own directory (configuration, tokenizer, chat template), and their canary is
        added. Raises Resumable.
        """
        told = self.canary(self.version) if self.sharded or self.rank == 0 else None
        if self.rank != 0:
            for _ in self._stream():
                """What rank 0 gathers, every rank gives."""
            return

        def write(partial: Path) -> None:
            if isinstance(self._held, Whole):
                self.model.save_pretrained(partial)
            else:
                write_files(partial, self._stream())
            shutil.copytree(self.model_dir, partial, ignore=shutil.ignore_patterns(*_NOT_COPIED), dirs_exist_ok=True)
            assert told is not None
            told.write(partial / CANARY)

        try:
            replace_directory(directory, write)
        except (OSError, SafetensorError) as error:
            raise Resumable(f"weights {directory}: {error}", "free some space in run.dir; the same command resumes") from error

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        return stream(self._held) if not isinstance(self._held, Whole) else iter(())

    @property
    def copied(self) -> int:
        """Bytes of host memory that `weights` takes on rank 0: on an accelerator, or of shards, all of them; else none (but for what is
        converted back)."""
        if isinstance(self._held, Whole):
            return sum(p.nbytes for p in self._held.parameters) if self.device.type == "cuda" else 0
        return self._held.published_bytes

    def weights(self, on_device: bool = False) -> list[tuple[str, torch.Tensor]]:
        """What `export` writes, without files: (name there, contiguous tensor). On a CPU the parameters themselves, no copies; on an
        accelerator copies in the host's memory, or, `on_device`, the parameters themselves there (but for what is converted back). Of
        shards always copies in the host's memory of rank 0; elsewhere nothing."""
        return published(self.model, on_device) if isinstance(self._held, Whole) else list(self._stream())

    def agreed(self, yes: bool) -> bool:
        """Whether every rank says yes (collective where the model is sharded)."""
        return not self._held.over_ranks(0.0 if yes else 1.0)

    def state(self) -> CoreState:
        """This rank's part of a checkpoint: its shard of master weights and optimizer state, RNG. Views; write before the next step."""
        from gyre_hpc.checkpoint import CoreState, model_fingerprint

        return CoreState(
            rank=self.rank,
            ranks=self.world,
            parameters=self._held.total,
            model=model_fingerprint(self.model_dir),
            version=self.version,
            arrays={**self._optimizer.arrays(), "rng/torch": torch.get_rng_state().numpy()},
            table=self._optimizer.table(),
        )

    def load_state(self, state: CoreState) -> None:
        """Continue from `state`. Raises ConfigError, with both numbers, where it belongs to another model or another core cell."""
        from gyre_hpc.checkpoint import Identity, model_fingerprint

        state.identity.require(Identity(model_fingerprint(self.model_dir), self._held.total, self.world))
        if state.rank != self.rank:
            raise ConfigError(f"core state of rank {state.rank} given to rank {self.rank}", "this is a mistake in the program")
        if list(state.table) != self._optimizer.table():
            raise ConfigError(
                "can't resume: the checkpoint's shards are cut otherwise than this run's",
                "set training.deepspeed.zero_optimization as it was for the checkpoint",
            )
        self._optimizer.load_arrays(state.arrays)
        torch.set_rng_state(torch.from_numpy(state.arrays["rng/torch"].copy()))
        self.version = state.version

    def close(self) -> None:
        """Leave the core cell's torch.distributed world."""
        self._optimizer.close()

    def _to_host(self) -> None:
        self._optimizer.offload()

    def _to_device(self) -> None:
        self._optimizer.onload()


def _one_rounding(_module: torch.nn.Module, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
    """Every number up or down by one rounding of its dtype, always in the same way."""
    up = torch.randint(0, 2, out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8).to(out.device, out.dtype)
    return out * (1 + torch.finfo(out.dtype).eps * (2 * up - 1))
