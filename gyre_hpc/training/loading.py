"""A policy's model from its directory: whole, or as a skeleton without memory that is filled by others.

Invariants: the model is in evaluation mode (no dropout: log-probs must be the engine's) and every parameter is trainable; what can't be
loaded is a ConfigError that names the directory. A skeleton has the parameters and buffers of the whole model, under the same names.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from gyre_hpc.config import Config
from gyre_hpc.errors import ConfigError
from gyre_hpc.importing import uncollected
from gyre_hpc.training.activations import recompute_layers

log = logging.getLogger(__name__)


def load(model_dir: Path, config: Config) -> Any:
    """The whole model in `model.dtype`, on the CPU. Raises ConfigError."""
    _check(model_dir, config)
    from pickle import UnpicklingError

    with uncollected():
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True, **_how(config))
    except (OSError, ValueError, ImportError, SafetensorError, UnpicklingError) as error:
        raise _unloadable(model_dir, config, error) from error
    if model.config.get_text_config(decoder=True)._attn_implementation == "eager":
        log.warning("attention is eager: what it takes grows with the square of a row's length; training.attention names another kind")
    return _prepared(model, config)


def skeleton(model_dir: Path, config: Config) -> Any:
    """The same model on the meta device: no memory, no values. Raises ConfigError."""
    _check(model_dir, config)
    with uncollected():
        from transformers import AutoConfig, AutoModelForCausalLM

    try:
        described = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(described, **_how(config))
    except (OSError, ValueError, ImportError) as error:
        raise _unloadable(model_dir, config, error) from error
    except (RuntimeError, NotImplementedError) as error:  # it looks at values while it is built
        raise ConfigError(
            f"model.path = {model_dir} can't be built without its weights: {error}", "this model can't be sharded: take ZeRO stage 1"
        ) from error
    model.tie_weights()
    return _prepared(model, config)


def _how(config: Config) -> dict[str, Any]:
    """Arguments of Hugging Face."""
    return {"dtype": getattr(torch, config.model.dtype), "attn_implementation": config.training.attention or None}


def _prepared(model: Any, config: Config) -> Any:
    model.requires_grad_(True)
    recompute_layers(model, config.training.activation_checkpointing)
    return model.eval()


def _check(model_dir: Path, config: Config) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"model.path = {model_dir} has no config.json", "give a Hugging Face causal-LM directory, or builtin:quickstart")
    if config.model.dtype == "float16":
        raise ConfigError("model.dtype = float16 can't be trained (its gradients underflow)", "use bfloat16 or float32")


def _unloadable(model_dir: Path, config: Config, error: BaseException) -> ConfigError:
    directory, kind = "give a Hugging Face causal-LM directory", config.training.attention
    if kind:  # not installed, not a name, or not for this model: Hugging Face raises the same kinds of errors as for a bad directory
        what = f"model.path = {model_dir} can't be loaded with training.attention = {kind}: {error}"
        return ConfigError(what, f"name another kind that is installed, or none; if that is not it, {directory}")
    return ConfigError(f"model.path = {model_dir} can't be loaded: {error}", directory)
