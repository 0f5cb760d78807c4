"""vLLM's server process as an engine, seen by the cell's leader: started, told what to do, ended. How calls are asked: vllm_client.py.

Weights: `vllm_worker` loads them over collective_rpc (a failed load leaves the model half new, so it ends the engine; weights that are
received and do not arrive never come near the model, weight_stream.py), then the prefix
cache is reset (vLLM keeps it otherwise: stale KV), then the version is set and read back, then one token is asked for. On GPU `release` is
sleep level 2, which drops weights and KV; a CPU has nothing to free and only the prefix cache goes.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gyre_hpc import processes
from gyre_hpc.engines import control, handover_nixl, vllm_guard
from gyre_hpc.engines.options import KV_GIB, as_arguments, on_cpu, vllm_options
from gyre_hpc.engines.protocol import (
    NIXL,
    EngineAddress,
    EngineFault,
    EngineSpec,
    Holding,
    NotReceived,
)
from gyre_hpc.engines.weight_member import SCHEME
from gyre_hpc.errors import ConfigError

log = logging.getLogger(__name__)

_GRACE = 10.0
_POLL = 0.25
MEASURED_SEQUENCES = 256
_CANARY = [1, 2, 3, 4, 5]


class VllmEngine:
    """An `EngineServer`. Options: `kv_gib` (CPU) and any of vLLM's own command line, without dashes in front."""

    def __init__(self, spec: EngineSpec, deadline: float) -> None:
        """Starts the server (tens of seconds) and waits until it serves. Raises EngineFault, ConfigError."""
        began = time.monotonic()
        secret = secrets.token_urlsafe(16)
        with control.hold_port(spec.host) as held, control.hold_port(spec.host) as beside:
            port = held.getsockname()[1]
            environment = _environment(spec, secret, beside.getsockname()[1])
            # on the parent's death TERM, not KILL: vLLM then takes its engine core with it
            process = processes.spawn(command(spec, port), spec.log, environment, death_signal=signal.SIGTERM)
            self._child = control.Child(process, spec.log)
            self.pid = self._child.pid
            self.address = EngineAddress("vllm", f"http://{spec.host}:{port}/{secret}", spec.capacity, spec.window, spec.handover)
            self._begin(spec, began + deadline)
        log.info("vLLM engine %d ready in %.1f s", self.pid, time.monotonic() - began)

    def _begin(self, spec: EngineSpec, end: float) -> None:
        """It serves the first version; nothing is left of one that does not."""
        self._sequences = sequences(spec)
        self._sleeps = not on_cpu()
        self._was_paused = False
        self._half: bool | None = None
        """None: the model is one version, whole. Else a broadcast broke, and this is whether it was paused before."""
        self._name = f"engine {self.pid} on {socket.gethostname()} ({secrets.token_hex(4)})"
        try:
            self._wait_ready(end)
            left = max(end - time.monotonic(), 1.0)
            if not spec.capacity:
                self.address = replace(self.address, capacity=self.holding(left).executions)
            self._set_version(spec.version, left)
            self._canary(spec.version, left)
        except BaseException:
            self.stop()
            raise

    def alive(self) -> bool:
        return self._child.alive()

    def health(self, deadline: float) -> dict[str, Any]:
        """{version, paused, in_flight} as the guard in the server sees them."""
        self._child.check()
        health: dict[str, Any] = self._get("gyre", deadline)
        return health

    def holding(self, deadline: float) -> Holding:
        """From its own metrics: KV blocks, and sequences that it schedules at once."""
        self._child.check()
        held = kv_tokens(control.text(f"{self.address.url}/metrics", deadline))
        return Holding(held, max(1, min(held // self.address.window, self._sequences)))

    def pause(self, deadline: float) -> None:
        end = time.monotonic() + deadline
        while True:  # a call that slipped in while the first pause was under way is ended by the next
            self._post("pause?mode=abort", end - time.monotonic())
            until = min(end, time.monotonic() + 1.0)
            while time.monotonic() < until:
                if self.health(end - time.monotonic())["in_flight"] == 0:
                    return
                time.sleep(0.01)
            if time.monotonic() >= end:
                raise EngineFault(f"vLLM engine {self.pid}: calls still in flight {deadline:.1f} s after pause")

    def resume(self, deadline: float) -> None:
        """Raises EngineFault where its weights are of two versions."""
        if self._half is not None:
            raise EngineFault(f"vLLM engine {self.pid} has taken a part of new weights only: it must load them first")
        self._post("resume", deadline)

    def update_weights(self, model: Path, version: int, deadline: float) -> None:
        end = time.monotonic() + deadline
        was_paused = self.health(deadline)["paused"] if self._half is None else self._half
        if not was_paused:
            self.pause(end - time.monotonic())
        self._load(model, version, end)
        self._half = None
        if not was_paused:
            self.resume(end - time.monotonic())
            self._canary(version, end - time.monotonic())

    def receive_weights(self, source: str, version: int, deadline: float) -> None:
        """All workers receive before the first takes; what breaks before leaves the engine as it was, paused or not.

        From a broadcast they take as they receive; one that breaks leaves it paused until `update_weights`.
        """
        end = time.monotonic() + deadline
        was_paused = self.health(deadline)["paused"]
        if not was_paused:
            self.pause(end - time.monotonic())
        way = self._attend if source.startswith(SCHEME) else self._fetch
        failed, half = way(source, version, end, end - deadline / 2 - time.monotonic())
        if half:
            self._half = was_paused
        elif not was_paused:
            self.resume(end - time.monotonic())
        if failed:
            raise NotReceived(f"vLLM engine {self.pid}: {failed}")
        if not was_paused:
            self._canary(version, end - time.monotonic())

    def release(self, deadline: float) -> None:
        end = time.monotonic() + deadline
        self._was_paused = self.health(deadline)["paused"]
        self.pause(end - time.monotonic())
        if self._sleeps:
            self._post("sleep?level=2&mode=abort", end - time.monotonic())
        else:
            self._reset_prefixes(end - time.monotonic())

    def restore(self, model: Path, version: int, deadline: float) -> None:
        """Paused or not as it was before `release`, after a canary under the new weights."""
        end = time.monotonic() + deadline
        if self._sleeps:
            self._post("wake_up?tags=weights", end - time.monotonic())
        self._load(model, version, end)
        if self._sleeps:
            self._post("wake_up?tags=kv_cache", end - time.monotonic())
        self.resume(end - time.monotonic())
        self._canary(version, end - time.monotonic())
        if self._was_paused:
            self.pause(end - time.monotonic())

    def logprobs(self, tokens: Sequence[int], deadline: float) -> list[float]:
        """vLLM's prompt log-probs; a paused engine serves for as long as that takes (nobody else's calls are sent to it then)."""
        end = time.monotonic() + deadline
        paused = self.health(deadline)["paused"]
        if paused:
            self.resume(end - time.monotonic())
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": list(tokens), "sampling_params": sampling}
        try:
            told = self._post("inference/v1/generate", end - time.monotonic(), body)["prompt_logprobs"]
        finally:
            if paused:
                self.pause(end - time.monotonic())
        return prompt_logprobs(tokens, told)

    def stop(self) -> None:
        self._child.stop(_GRACE)

    def _load(self, model: Path, version: int, end: float) -> None:
        path = str(model.resolve())
        self._take(version, path, end - time.monotonic(), "gyre_load_weights", path)

    def _fetch(self, source: str, version: int, end: float, seconds: float) -> tuple[str, bool]:
        """From a stream that has `seconds`: (why not, "" when all workers have it all; False: nothing is half new)."""
        told = self._workers("gyre_receive_weights", end - time.monotonic(), source, version, seconds)
        failed = _first_failure(told)
        if failed:
            self._workers("gyre_forget_weights", end - time.monotonic())
        else:
            self._take(version, source.partition("/")[0], end - time.monotonic(), "gyre_take_weights")
        return failed, False

    def _attend(self, source: str, version: int, end: float, seconds: float) -> tuple[str, bool]:
        """From a broadcast that has `seconds`: (why not, whether the engine is half new)."""
        origin = "a broadcast of " + source.removeprefix(SCHEME).partition("/")[0]
        told = self._take(version, origin, end - time.monotonic(), "gyre_attend_weights", source, version, seconds, self._name)
        failed = _first_failure(told)
        return failed, bool(failed) and any(result.get("half", "failed" not in result) for result in told)

    def _take(self, version: int, origin: str, deadline: float, method: str, *args: object) -> list[Any]:
        """All workers get new weights by `method`; prefix cache, then version. What fails here ends the engine: it may be half new.

        Returns their answers; where one of these tells a failure nothing more was done.
        """
        end = time.monotonic() + deadline
        try:
            told = self._workers(method, deadline, *args)
            if _first_failure(told):
                return told
            self._reset_prefixes(end - time.monotonic())
            self._set_version(version, end - time.monotonic())
        except EngineFault as error:
            self.stop()
            raise EngineFault(f"vLLM engine {self.pid} could not take version {version} from {origin} and was ended: {error}") from error
        return told

    def _workers(self, method: str, deadline: float, *args: object) -> list[Any]:
        """What each worker's `method` (vllm_worker.py) answers."""
        answer = self._post("collective_rpc", deadline, {"method": method, "args": list(args), "timeout": deadline})
        return list(answer["results"]) if answer else []

    def _reset_prefixes(self, deadline: float) -> None:
        if not self._post("reset_prefix_cache", deadline)["success"]:
            raise EngineFault(f"vLLM engine {self.pid} did not drop its prefix cache: blocks still in use")

    def _set_version(self, version: int, deadline: float) -> None:
        self._post("update_weight_version", deadline, {"new_version": str(version)})
        self._post(f"gyre/version?{version}", deadline)
        have = self._get("weight_info", deadline)["weight_version"]
        if have != str(version):
            raise EngineFault(f"vLLM engine {self.pid} says version {have} after loading version {version}")

    def _canary(self, version: int, deadline: float) -> None:
        """One token through the whole path: a finite log-prob of the expected version."""
        body = {"token_ids": _CANARY, "sampling_params": {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "detokenize": False}}
        choice = self._post("inference/v1/generate", deadline, body)["choices"][0]
        logprob = choice["logprobs"]["content"][0]["logprob"]
        versions = {span["version"] for span in choice["weight_versions"]}
        if not (math.isfinite(logprob) and logprob > -9999.0) or versions != {str(version)}:
            raise EngineFault(f"vLLM engine {self.pid}: canary of version {version} gave log-prob {logprob} under versions {versions}")

    def _wait_ready(self, end: float) -> None:
        while True:
            self._child.check()
            try:
                self._get("health", 2.0)
                return
            except EngineFault:
                if time.monotonic() > end:
                    raise EngineFault(f"vLLM engine {self.pid} not ready in time: {control.last_line(self._child.log_file)}") from None
            time.sleep(_POLL)

    def _get(self, name: str, deadline: float) -> Any:
        return control.call(f"{self.address.url}/{name}", deadline, method="GET")

    def _post(self, name: str, deadline: float, body: dict[str, Any] | None = None) -> Any:
        self._child.check()
        return control.call(f"{self.address.url}/{name}", deadline, body)


def _first_failure(told: Sequence[Any]) -> str:
    """Of workers' answers: None, or a dictionary that may have `failed`."""
    return next((str(result["failed"]) for result in told if result and "failed" in result), "")


def command(spec: EngineSpec, port: int) -> list[str]:
    """The server's command line. Raises ConfigError for options that are ours to set."""
    given = vllm_options(spec.options)
    if not (spec.model / "config.json").is_file():
        raise ConfigError(f"model {spec.model}: no config.json there", "give the directory of a Hugging Face causal LM")
    options: dict[str, object] = {
        "model": spec.model.resolve(),
        "host": spec.host,
        "port": port,
        "dtype": spec.dtype,
        "max-model-len": spec.window,
        "max-num-seqs": sequences(spec),
        "middleware": "gyre_hpc.engines.vllm_guard.Guard",
        "worker-extension-cls": "gyre_hpc.engines.vllm_worker.WorkerExtension",
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "stream-interval": 4,
        "seed": secrets.randbelow(2**31),
        "enable-scale-out": True,
        "skip-tokenizer-init": True,
        "disable-uvicorn-access-log": True,
        "enable-prefix-caching": True,
    }
    if on_cpu():
        options["enforce-eager"] = True  # compiling takes longer than a small run
    else:
        options["enable-sleep-mode"] = True
    if spec.handover == NIXL:
        options.update(handover_nixl.options(given, on_cpu()))
    return [*processes.python("gyre_hpc.engines.vllm_main"), *as_arguments({**options, **given})]


def prompt_logprobs(tokens: Sequence[int], told: Any) -> list[float]:
    """Nats of tokens[1:] from an answer's `prompt_logprobs`: a table {id: {logprob}} for every token, none for the first. EngineFault."""
    try:
        return [float(table[str(token)]["logprob"]) for token, table in zip(tokens[1:], told[1:], strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineFault(f"vLLM's log-probs of a prompt of {len(tokens)} tokens: {type(error).__name__} {error}") from error


def sequences(spec: EngineSpec) -> int:
    """Calls that it schedules at once: its capacity; where that is to be measured, the user's option or MEASURED_SEQUENCES."""
    given = spec.options.get("max-num-seqs", spec.options.get("max_num_seqs"))
    return int(str(given)) if given is not None else spec.capacity or MEASURED_SEQUENCES


def kv_tokens(metrics: str) -> int:
    """Tokens of KV cache that a server has, from the text of its `/metrics`. Raises EngineFault where they are not told."""
    line = next((line for line in metrics.splitlines() if line.startswith("vllm:cache_config_info{")), "")
    found = {name: re.search(rf'[{{,]{name}="(\d+)"', line) for name in ("num_gpu_blocks", "block_size")}
    blocks, size = found["num_gpu_blocks"], found["block_size"]
    if blocks is None or size is None:
        raise EngineFault("vLLM's metrics do not tell its KV cache (vllm:cache_config_info): set rollout.capacity")
    return int(blocks[1]) * int(size[1])


def _environment(spec: EngineSpec, secret: str, side_channel: int) -> dict[str, str]:
    extra = {
        **control.visible_devices(spec.devices, os.environ),
        vllm_guard.SECRET: secret,
        vllm_guard.VERSION: str(spec.version),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if on_cpu():
        extra["VLLM_CPU_KVCACHE_SPACE"] = str(spec.options.get(KV_GIB, 1))
        # several engines share a machine: each keeps to its number of threads, the kernel places them
        extra["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        extra["OMP_NUM_THREADS"] = str(spec.threads)
    if spec.handover == NIXL:
        extra.update(handover_nixl.environment(spec.host, side_channel))
    return processes.child_environment(extra)
