"""The trainers of a cell: `Satellite` computes gradients, `Core` computes gradients and owns the weights and the optimizer.

Invariants
- What leaves an actor is a sum: `gradient()` is the unnormalised float32 sum of the rows' gradients since `zero()`; who computed which row
  never matters. `Core.step` divides the sum over all cells by the number of executions, once.
- All flat vectors are float32 in the order of `model.parameters()` (tied weights once), so both sides agree without names.
- Gradients are taken by `torch.autograd.grad`, beside the parameters' `.grad`: DeepSpeed's reduction hooks see only the one finished
  gradient of `Core.step`. Weights do not change between steps, so a snapshot pulled while others accumulate is the right one.
- `version` is the number of optimizer steps taken.
- The core's torch.distributed world is the core cell's ranks and nobody else; MPI is neither used nor initialised here.

The satellite stands outside torch.distributed. On a CPU `offload` and `onload` have nothing to move.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
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
from gyre_hpc.importing import uncollected
from gyre_hpc.training.activations import recompute_layers
from gyre_hpc.training.head import target_logprobs
from gyre_hpc.training.loss import Objective, Sums, batch_loss
from gyre_hpc.training.rows import TrainRow, stack

if TYPE_CHECKING:
    from gyre_hpc.checkpoint import CoreState

log = logging.getLogger(__name__)

_NOT_COPIED = ("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.h5", "*.gguf", "*.onnx", ".*")
"""Weights in any format, and hidden files (a clone's .git, caches)."""


class Satellite:
    """A plain module that follows the core's weights and sums gradients over rows.

    `model_dir`: a Hugging Face causal-LM directory. Raises ConfigError where the model can't be loaded or trained.
    """

    def __init__(self, model_dir: Path, config: Config, local_rank: int = 0) -> None:
        torch.set_num_threads(config.training.threads)
        self.model_dir = model_dir
        self.config = config
        self.device = torch.device("cuda", local_rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
        self.model = _load(model_dir, config).to(self.device)
        self.rule = Objective(config.rollout.temperature, config.training.token_cap, config.training.clip_low, config.training.clip_high)
        self._parameters: list[torch.nn.Parameter] = list(self.model.parameters())
        self.size = sum(p.numel() for p in self._parameters)
        self._sum: torch.Tensor | None = None

    def pull(self, flat: NDArray[np.float32]) -> None:
        """Take the core's weights, float32[size]. Raises ValueError on another length."""
        self._check(flat)
        with torch.no_grad():
            for parameter, part in zip(self._parameters, self._views(torch.from_numpy(flat)), strict=True):
                parameter.copy_(part)

    def snapshot(self) -> NDArray[np.float32]:
        """The weights now, float32[size], a copy."""
        flat = torch.empty(self.size, dtype=torch.float32)
        with torch.no_grad():
            for parameter, part in zip(self._parameters, self._views(flat), strict=True):
                part.copy_(parameter)
        return flat.numpy()

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Nats of tokens[1:], each after those before it, at temperature 1, by the forward pass that trains. At least two tokens."""
        ids = torch.tensor([list(tokens)], device=self.device)
        at = torch.arange(1, len(tokens), device=self.device)
        with torch.no_grad():
            # in two chunks: a model whose head can't be run so is found out by its first canary, not by its first long row
            logprobs, _ = target_logprobs(self.model, ids, torch.zeros_like(at), at, chunk=max(1, len(at) // 2))
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
        """Add the gradient of these rows to the sum. Any number of rows; memory is bounded by training.tokens_per_microstep."""
        if self._sum is None:
            self.zero()
        total = Sums()
        for batch in stack(rows, self.config.training.tokens_per_microstep):
            loss, sums = batch_loss(self.model, batch, self.rule, self.device)
            gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
            assert self._sum is not None
            for gradient, part in zip(gradients, self._views(self._sum), strict=True):
                if gradient is not None:
                    part.add_(gradient)
            total = total + sums
        return total

    def gradient(self) -> NDArray[np.float32]:
        """The sum of the rows' gradients since `zero`, float32[size], a copy; zeros if there were none."""
        if self._sum is None:
            return np.zeros(self.size, np.float32)
        return self._sum.cpu().numpy().copy()

    def zero(self) -> None:
        """Forget the sum."""
        if self._sum is None:
            self._sum = torch.zeros(self.size, dtype=torch.float32, device=self.device)
        else:
            self._sum.zero_()

    def offload(self) -> None:
        """Give the accelerator's memory to the inference engine (the sum of gradients must have been taken). CPU: nothing to do."""
        if self.device.type == "cuda":
            self._sum = None
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Undo `offload`; weights may be stale: pull before accumulating."""
        if self.device.type == "cuda":
            self.model.to(self.device)

    def _check(self, flat: NDArray[np.float32]) -> None:
        if flat.dtype != np.float32 or flat.shape != (self.size,):
            raise ValueError(f"flat vector of {flat.dtype} {flat.shape}, the model has float32 ({self.size},)")

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = flat.split([p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]


@dataclass(frozen=True)
class StepMetrics:
    """`grad_norm` before clipping; `lr` that was used; `version` after the step."""

    grad_norm: float
    lr: float
    version: int


class Core(Satellite):
    """A satellite that also holds the authoritative weights and, with the other ranks of the core cell, the optimizer (DeepSpeed ZeRO).

    `rank` of `world` ranks of the core cell; `master` "host:port" where its rank 0 listens. The constructor is collective over them, and
    so are `step` and `load_state`. Raises ConfigError for what can't be trained.
    """

    def __init__(self, model_dir: Path, config: Config, rank: int, world: int, master: str, local_rank: int = 0) -> None:
        super().__init__(model_dir, config, local_rank)
        from gyre_hpc.training import engine

        self.rank, self.world = rank, world
        self.version = 0
        self._zero = engine.Zero(self.model, self._parameters, config, rank, world, master, self.device)

    def pull(self, flat: NDArray[np.float32]) -> None:
        """Refused: the core's weights come from its optimizer, and only `load_state` may replace both."""
        raise ValueError("the core takes no weights from anybody; load_state replaces weights and optimizer together")

    def lr(self, step: int) -> float:
        """Learning rate of step `step` (from 0): linear warm-up, then constant."""
        training = self.config.training
        return training.lr * min(1.0, (step + 1) / training.warmup_steps) if training.warmup_steps else training.lr

    def step(self, gradient: NDArray[np.float32], executions: int) -> StepMetrics:
        """One optimizer step with `gradient` / `executions`; `gradient` is the sum over all cells, the same on every rank of the core cell.

        Raises GyreError, with the weights unchanged, if it is not finite; ValueError without executions.
        """
        self._check(gradient)
        if executions < 1:
            raise ValueError(f"a step over {executions} executions")
        if not np.isfinite(gradient).all():
            raise GyreError(
                f"step {self.version + 1}: the gradient has {int((~np.isfinite(gradient)).sum())} values that are not finite",
                "the weights are unchanged; start a new run.dir with a lower training.lr or training.clip_grad, "
                "model.path = the newest folder in RUN/weights goes on from there",
            )
        lr = self.lr(self.version)
        mean = torch.from_numpy(gradient).to(self.device) / executions
        norm = self._zero.step(self._views(mean), lr)
        self.version += 1
        return StepMetrics(grad_norm=norm, lr=lr, version=self.version)

    def export(self, directory: Path) -> None:
        """Write the weights as a Hugging Face directory for the engines: whole or absent, durable when this returns. Rank 0 only.

        Everything but the weights is copied from the model's own directory (configuration, tokenizer, chat template), and their canary is
        added. Raises Resumable.
        """
        if self.rank != 0:
            return

        def write(partial: Path) -> None:
            self.model.save_pretrained(partial)
            shutil.copytree(self.model_dir, partial, ignore=shutil.ignore_patterns(*_NOT_COPIED), dirs_exist_ok=True)
            self.canary(self.version).write(partial / CANARY)

        try:
            replace_directory(directory, write)
        except (OSError, SafetensorError) as error:
            raise Resumable(f"weights {directory}: {error}", "free some space in run.dir; the same command resumes") from error

    @property
    def copied(self) -> int:
        """Bytes of host memory that `weights` takes: on an accelerator all of them, on a CPU none (but for what is converted back)."""
        return sum(p.nbytes for p in self._parameters) if self.device.type == "cuda" else 0

    def weights(self, on_device: bool = False) -> list[tuple[str, torch.Tensor]]:
        """What `export` writes, without files: (name there, contiguous tensor). On a CPU the parameters themselves, no copies; on an
        accelerator copies in the host's memory, or, `on_device`, the parameters themselves there (but for what is converted back)."""
        return published(self.model, on_device)

    def state(self) -> CoreState:
        """This rank's part of a checkpoint: its shard of master weights and optimizer state, RNG. Views; write before the next step."""
        from gyre_hpc.checkpoint import CoreState, model_fingerprint

        return CoreState(
            rank=self.rank,
            ranks=self.world,
            parameters=self.size,
            model=model_fingerprint(self.model_dir),
            version=self.version,
            arrays={**self._zero.arrays(), "rng/torch": torch.get_rng_state().numpy()},
            table=self._zero.table(),
        )

    def load_state(self, state: CoreState) -> None:
        """Continue from `state`. Raises ConfigError, with both numbers, where it belongs to another model or another core cell."""
        from gyre_hpc.checkpoint import Identity, model_fingerprint

        state.identity.require(Identity(model_fingerprint(self.model_dir), self.size, self.world))
        if state.rank != self.rank:
            raise ConfigError(f"core state of rank {state.rank} given to rank {self.rank}", "this is a mistake in the program")
        self._zero.load_arrays(state.arrays)
        torch.set_rng_state(torch.from_numpy(state.arrays["rng/torch"].copy()))
        self.version = state.version

    def close(self) -> None:
        """Leave the core cell's torch.distributed world."""
        self._zero.close()

    def offload(self) -> None:
        if self.device.type == "cuda":
            self._sum = None
            self._zero.offload()

    def onload(self) -> None:
        if self.device.type == "cuda":
            self._zero.onload()


def _one_rounding(_module: torch.nn.Module, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
    """Every number up or down by one rounding of its dtype, always in the same way."""
    up = torch.randint(0, 2, out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8).to(out.device, out.dtype)
    return out * (1 + torch.finfo(out.dtype).eps * (2 * up - 1))


def published(model: Any, on_device: bool = False) -> list[tuple[str, torch.Tensor]]:
    """The tensors that `save_pretrained` would write, under the names that it would give them: tied ones once, converted ones back."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    with torch.no_grad():
        state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        for name in model._keys_to_ignore_on_save or ():
            state.pop(name, None)
        state = revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))
        return [(name, (tensor if on_device else tensor.to("cpu")).contiguous()) for name, tensor in state.items()]


def _load(model_dir: Path, config: Config) -> Any:
    """The model in evaluation mode (no dropout: log-probs must be the engine's), every parameter trainable."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"model.path = {model_dir} has no config.json", "give a Hugging Face causal-LM directory, or builtin:quickstart")
    if config.model.dtype == "float16":
        raise ConfigError("model.dtype = float16 can't be trained (its gradients underflow)", "use bfloat16 or float32")
    from pickle import UnpicklingError

    with uncollected():
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, config.model.dtype), local_files_only=True)
    except (OSError, ValueError, SafetensorError, UnpicklingError) as error:
        raise ConfigError(f"model.path = {model_dir} can't be loaded: {error}", "give a Hugging Face causal-LM directory") from error
    model.requires_grad_(True)
    recompute_layers(model, config.training.activation_checkpointing)
    return model.eval()
