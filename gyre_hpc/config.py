"""Every key of a run's configuration, section by section, as frozen types (contract: unknown keys are refused).

Invariants: a `Config` is complete (every default filled in) and immutable; a value that is wrong by itself is refused here, one that
does not fit others in crosscheck.py; configfile.py reads and writes them. Below everything that knows what a key means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, WrapValidator, field_validator
from pydantic_core import PydanticCustomError

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]


def _waitable(seconds: float) -> float:
    """30 years stand for `never`; sockets and locks take no more than some 9e9 seconds."""
    if seconds > 1e9:
        raise PydanticCustomError("too_long", "at most 1e9 seconds, which is never")
    return seconds


Seconds = Annotated[float, Field(gt=0.0), AfterValidator(_waitable)]
MiB = Annotated[int, Field(ge=1, le=2**40)]
"""At most an exbibyte: the kernel counts bytes in 63 bits."""
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]

BUILTIN_MODEL = "builtin:quickstart"
_WANTED: Mapping[Any, str] = {int: "a whole number", float: "a number", str: "a text"}


def _layers(value: Any, among: Any) -> Any:
    """One line for both kinds of answer: a union's own names its members as if they were keys, and the first of them only."""
    try:
        return among(value)
    except ValidationError:
        raise PydanticCustomError("no_layers", "auto, true, false or offload") from None


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`run.steps=true` is a mistake, not one step: python counts a bool among its ints."""
        if isinstance(value, bool):
            annotation: Any = cls.model_fields[info.field_name or ""].annotation
            members = [get_args(part)[0] if get_origin(part) is Annotated else part for part in get_args(annotation) or (annotation,)]
            wanted = next((_WANTED[member] for member in members if member in _WANTED), None)
            if wanted is not None:
                raise PydanticCustomError("bool_as_number", "{wanted} is wanted here, not true or false", {"wanted": wanted})
        return value


class RunSection(_Section):
    """What the run is called, where it lives and how long it goes on."""

    name: str = ""
    """Also of the run's folder, unless `dir` says where."""
    dir: Path | None = None
    seed: int = 0
    steps: Positive = 20
    min_free_mb: Annotated[int, Field(ge=0)] = 512
    """Free space that the run directory's file system must have at the start; the run stops, resumable, when a quarter of it is left."""

    @field_validator("name")
    @classmethod
    def _one_folder(cls, value: str) -> str:
        """A name with a path in it would make the run somewhere else than below `runs`."""
        if "/" in value or value in (".", "..") or not value.isprintable():
            raise PydanticCustomError("no_name", "a name has no / and no control characters in it; run.dir says where a run lives")
        return value


class ModelSection(_Section):
    """The policy: a Hugging Face causal-LM directory, or the small model that is built by the recipe in the repository."""

    path: str = BUILTIN_MODEL
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    window: Positive = 1024
    """Tokens of context, prompt and output together."""
    tool_parser: str = "hermes"
    """How tool calls are read out of sampled text: hermes, or a name of vLLM's."""
    reasoning_parser: str = "think"
    """How thoughts are: think, none, or a name of vLLM's."""


class TasksSection(_Section):
    """Where tasks come from: the seeded generator, or a folder of tasks in Harbor format."""

    source: str = "builtin:chores"
    seed: int = 0
    difficulty: Annotated[list[Positive], Field(min_length=1)] = [1, 2, 3]
    """Grades to draw from, uniformly."""


class HarnessSection(_Section):
    """The agent program of an execution, and its budgets (seconds of wall clock)."""

    kind: Literal["bundled", "claude-code", "codex", "qwen-code", "opencode", "mini-swe-agent", "command"] = "bundled"
    path: str = ""
    """Where the program is installed (a folder, or the program itself); boxes show it read-only at the same path."""
    argv: list[str] = []
    """Further arguments of the program; for `command` its whole command line, in which {instruction} stands for the task."""
    env: dict[str, str] = {}
    """Further environment variables of the program."""
    stable: bool = True
    """Settings with which a program changes as little as it can of what it sent before."""
    compaction: Probability = 0.1
    sub_agent: Probability = 0.1
    retry: Probability = 0.1
    max_turns: Positive = 8
    max_tokens: Positive = 128
    timeout: Seconds = 60.0
    overall_timeout: Seconds = 300.0
    tool_delay: Annotated[float, Field(ge=0.0)] = 0.0
    """Mean seconds that a tool call sleeps on top: a long tail, see `tool_spread`."""
    tool_spread: Annotated[float, Field(ge=0.0)] = 0.0
    """0: that sleep is exponential; else log-normal, this is the sigma of its logarithm."""
    tool_timeout: Seconds = 30.0
    tool_output: Positive = 1000
    """Characters of a tool's output that the model sees; more is cut in the middle."""
    slots_per_node: Positive = 256
    """Executions that one node's supervisor runs at once."""
    starts_at_once: Positive = 8
    """Boxes that one node sets up at the same time (a burst of hundreds of starts would starve what runs)."""
    processes: Annotated[int, Field(ge=1, le=2**22)] = 128
    """As many as Linux numbers, at most."""
    memory_mb: MiB = 4096
    """Of one process of a box."""
    disk_mb: MiB = 64
    """Of a workspace, of one file in it, of what the program prints, and of a box's /tmp."""
    inodes: Positive = 20000
    binds: list[str] = []
    """Folders of the host that boxes show read-only at the same path, beside the system's: a module system's libraries, say."""
    keep_workspaces: bool = False
    """Keep them after the score, for a look by hand."""

    @field_validator("env")
    @classmethod
    def _names_of_variables(cls, value: dict[str, str]) -> dict[str, str]:
        """What no environment can hold would fail every execution."""
        wrong = next((name for name in value if not name or "=" in name), None)
        if wrong is not None:
            raise PydanticCustomError("no_variable", "{name} is no name of a variable: not empty, and without =", {"name": repr(wrong)})
        return value


class VerifierSection(_Section):
    """Scoring of the preserved workspace; budgets of its own, never what is left of the agent's."""

    timeout: Seconds = 60.0
    retries: Annotated[int, Field(ge=0)] = 2
    """Times that a failed evaluator (not a legal 0) is tried again."""


class RolloutSection(_Section):
    """Inference engines and how they sample."""

    engine: Literal["torch", "vllm"] = "torch"
    handover: Literal["recompute", "nixl"] = "recompute"
    """How the KV of conversations gets to another engine when a cell leaves rollout."""
    engines_per_cell: Annotated[int, Field(ge=1, le=65536)] = 1
    """Inference engines of one cell, spread over its ranks."""
    capacity: Annotated[int, Field(ge=0)] = 64
    """Executions that one engine can hold at once; 0: what the engine says itself."""
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    threads: Positive = 1
    restarts: Annotated[int, Field(ge=0)] = 2
    """Times that one engine is started again after it died, in one attempt; then the run stops, resumable."""
    canary: Annotated[float, Field(gt=0.0)] | None = None
    """Nats by which an engine's log-probs may differ from the trainer's, in the mean over the canary (canary.py); null: by model.dtype."""
    options: dict[str, Any] = {}
    """Passed to the engine as they are (for vllm: command line options)."""


class GatewaySection(_Section):
    """Where harnesses and the run's processes find the gateway, and what it allows."""

    host: str = "127.0.0.1"
    """Address to listen on. On several nodes the name by which the others reach the first node; the driver sets it."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    ping: Seconds = 5.0
    """Between signs of life on a call that waits."""
    max_calls: Positive = 1000
    """Model calls of one execution (a harness may compact for ever)."""
    max_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens that the policy may sample in one execution; 0: as many as its calls take. What calls in flight may take is
    reserved, others wait."""
    max_body_mb: Positive = 256
    """Megabytes of one request's body."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Further tries of an execution that was lost, for each kind of loss."""
    seal_every: Positive = 256
    """Ended executions after which the journal is sealed into an HDF5 segment."""

    @field_validator("host")
    @classmethod
    def _name_of_a_host(cls, value: str) -> str:
        """It becomes the middle of a URL, in front of a port."""
        if not re.fullmatch(r"[\w.-]+", value):
            raise PydanticCustomError("no_host", "a host's name or IPv4 address is wanted, without a port")
        return value


class UpstreamSection(_Section):
    """Inference servers of others, before which `gyre gateway` records; `gyre run` starts engines of its own and has none of these."""

    urls: list[str] = []
    """Of OpenAI-compatible servers, for example http://host:8000/v1; all serve the same weights."""
    kind: Literal["openai", "vllm"] = "openai"
    """openai: /v1/completions with token ids in and out (vLLM, SGLang); vllm: vLLM's /inference/v1/generate."""
    model: str = ""
    """The name that a call asks for; empty: the first that the server lists."""
    key_variable: str = ""
    """Name of the environment variable that holds the servers' API key; a key never stands in a file."""
    capacity: Positive = 64
    """Executions that call one server at the same time; the calls of others wait."""
    version_path: str = ""
    """Where a server tells its `weight_version` (vLLM: /weight_info, SGLang: /model_info); empty: whoever trains declares it."""
    poll: Seconds = 5.0
    """Between two looks at `version_path`."""


class CellsSection(_Section):
    """How the allocation is cut: K cells of whole nodes in a fixed order, cell 0 the core, and standalone nodes that only serve."""

    count: Positive = 3
    nodes_per_cell: Positive = 1
    ranks_per_node: Annotated[int, Field(ge=1, le=4096)] = 1
    standalone: Annotated[int, Field(ge=0)] = 0
    """Nodes beside the cells that only roll out."""
    leftover: bool = True
    """Nodes of the allocation that make no cell are standalone ones, too; without it they only run agents."""


class ScheduleSection(_Section):
    """Bursts and boundary dispatch (qwengyre.md section 2): outstanding groups are topped up to (phi + mu) * groups_per_step."""

    phi: Annotated[float, Field(ge=0.0)] = 0.5
    mu: Positive = 1
    groups_per_step: Positive = 16
    group_size: Annotated[int, Field(ge=2)] = 8
    staleness_bound: Annotated[int, Field(ge=0)] | None = None
    mode: Literal["elastic", "colocate", "async"] = "elastic"
    """Who trains when (cells/policies.py)."""
    streaming: bool = True
    """Train on groups as they come; without it, once all groups of a burst are complete."""
    trainers: Positive | None = None
    """Only the first so many cells ever train, the others roll out; null: all of them."""
    join_late: bool = False
    """Keep a step open for cells that come free while it is computed; without it a step closes when its last group was fed."""
    shuffle: bool = False
    """Mix the rows of a step's groups (controller/plan.py); only where a step's groups are all there before its training begins."""


class TrainingSection(_Section):
    """Selection, objective and optimizer."""

    lr: Annotated[float, Field(gt=0.0)] = 1e-3
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    clip_grad: Annotated[float, Field(ge=0.0)] = 1.0
    """Norm of the final gradient; 0 switches clipping off."""
    jmax: Positive = 5
    token_cap: Annotated[float, Field(gt=0.0)] = 5.0
    clip_low: Annotated[float, Field(gt=0.0)] = 0.995
    clip_high: Annotated[float, Field(gt=0.0)] = 1.005
    data_parallel: Positive | None = None
    """Ranks of a cell that share its rows; null: all that the other two leave."""
    tensor_parallel: Positive = 1
    pipeline_parallel: Positive = 1
    tokens_per_microstep: Positive = 4096
    activation_checkpointing: Annotated[Literal["auto", "offload"] | bool, WrapValidator(_layers)] = "auto"
    """Which decoder layers are computed again in the backward: true all, false none, auto those whose activations don't fit;
    offload: all, and their inputs wait in the host's memory (training/activations.py)."""
    attention: str = ""
    """Hugging Face's attn_implementation; empty: its own choice."""
    threads: Positive = 1
    deepspeed: dict[str, Any] = {}
    """Merged over the DeepSpeed configuration that we write."""


class CheckpointSection(_Section):
    every: Positive = 1
    keep: Positive = 2
    slowest_read: Annotated[float, Field(gt=0.0)] = 50.0
    """MB/s at which a rank of the core reads its shard at the least; a resume's deadlines grow with the bytes by it."""
    slowest_write: Annotated[float, Field(gt=0.0)] = 50.0
    """MB/s at which it writes it; the deadline of a step with a checkpoint grows with the bytes by it."""


class PublicationSection(_Section):
    """How new weights get into the engines that serve."""

    path: Literal["auto", "files", "direct", "broadcast"] = "auto"
    """files: each engine loads the published directory; direct: each receives it from the core's memory (engines/weight_stream.py);
    broadcast: all of them at once (engines/weight_broadcast.py)."""


TransferPhase = Literal[
    "unroute", "reserve", "hold", "hand-over", "acknowledge", "release", "restore", "join", "leave", "update", "wake", "route"
]
"""Those of cells/transfer.py."""


class DeadlinesSection(_Section):
    """Longest waits, in seconds. Every wait names itself and logs when half of its deadline is gone."""

    start: Seconds = 300.0
    transfer: Seconds = 120.0
    phases: dict[TransferPhase, Seconds] = {}
    """Of single phases of a change of roles, where they differ from `transfer`."""
    step: Seconds = 600.0
    idle: Seconds = 600.0
    """Without any execution ending or any step."""
    gateway: Seconds = 20.0
    """That the gateway's control API may be out of reach for the controller and the driver."""
    stop: Seconds = 10.0

    def of_phase(self, name: str) -> float:
        """Seconds for one phase of a change of roles."""
        return next((seconds for phase, seconds in self.phases.items() if phase == name), self.transfer)


class SlurmSection(_Section):
    """What `gyre submit` and `gyre sweep` ask Slurm for (passed through submitit)."""

    time_minutes: Positive = 60
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    cpus_per_task: Positive = 1
    signal_seconds: Positive = 60
    max_requeues: Annotated[int, Field(ge=0)] = 20
    additional: dict[str, Any] = {}
    setup: list[str] = []
    srun_options: list[str] = []
    """Handed to every srun of a run inside an allocation, for example ["--gpus-per-node=4"]."""


class SweepSection(_Section):
    """A grid: dotted key -> values; every combination is one point of one job array."""

    grid: dict[str, list[Any]] = {}
    parallelism: Positive = 16


class Config(_Section):
    """Everything about one run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    tasks: TasksSection = TasksSection()
    harness: HarnessSection = HarnessSection()
    verifier: VerifierSection = VerifierSection()
    rollout: RolloutSection = RolloutSection()
    gateway: GatewaySection = GatewaySection()
    upstream: UpstreamSection = UpstreamSection()
    cells: CellsSection = CellsSection()
    schedule: ScheduleSection = ScheduleSection()
    training: TrainingSection = TrainingSection()
    checkpoint: CheckpointSection = CheckpointSection()
    publication: PublicationSection = PublicationSection()
    deadlines: DeadlinesSection = DeadlinesSection()
    slurm: SlurmSection = SlurmSection()
    sweep: SweepSection = SweepSection()

    @property
    def run_dir(self) -> Path:
        """The run directory: `run.dir`, or `runs/<name>` below the current folder."""
        return self.run.dir if self.run.dir is not None else Path("runs") / self.run.name


def valid_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """All dotted keys of the configuration."""
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from valid_keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
