"""How a cell's ranks, engines and devices fit together, as arithmetic on the configuration; nothing here touches a process.

Invariants: a node's MPI ranks stand for its devices (`cells.ranks_per_node`); an engine lives on one node and has consecutive devices of
it; engine e of E in a cell of R devices begins at device e * R // E, so engines are spread evenly, and none shares a device as long as
E <= R. A standalone node is a small cell with one rank: it owns the engines that a cell has for each of its nodes (one at least). What
can't work is refused with the numbers and the nearest that can; what only wastes is said (`waste`).

Ordering key: engines are numbered in the order of the slots that own them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gyre_hpc.errors import ConfigError

if TYPE_CHECKING:
    from gyre_hpc.config import CellsSection, Config

PROCESSES_PER_CORE = 32
"""Beyond so many processes a core nothing would ever get done: refused; beyond an eighth of it, said."""


@dataclass(frozen=True)
class Seat:
    """One engine of a cell: the slot whose rank owns it, and its devices on that node (empty: whatever the process sees)."""

    engine: int
    slot: int
    devices: tuple[int, ...] = ()


def seats(nodes: int, devices_per_node: int, engines: int, ranks_per_node: int) -> tuple[Seat, ...]:
    """Where the engines of a cell of `nodes` nodes go. One engine alone sees all devices of its node."""
    width = nodes * devices_per_node
    found = []
    for engine in range(engines):
        first = engine * width // engines
        last = max(first + 1, (engine + 1) * width // engines)
        node = first // devices_per_node
        own = range(first, min(last, (node + 1) * devices_per_node))
        slot = node * ranks_per_node + (first % devices_per_node) * ranks_per_node // devices_per_node
        found.append(Seat(engine, slot, tuple(d % devices_per_node for d in own) if engines > 1 else ()))
    return tuple(found)


def cell_seats(config: Config, standalone: bool) -> tuple[Seat, ...]:
    """The engines of one cell, or of one standalone node."""
    cells, engines = config.cells, config.rollout.engines_per_cell
    if standalone:
        return seats(1, cells.ranks_per_node, standalone_engines(config), 1)
    return seats(cells.nodes_per_cell, cells.ranks_per_node, engines, cells.ranks_per_node)


def standalone_engines(config: Config) -> int:
    """Engines of a standalone node: as many as a cell has for each of its nodes, one at least."""
    return max(1, config.rollout.engines_per_cell // config.cells.nodes_per_cell)


def cell_capacities(config: Config) -> list[int]:
    """Executions that each cell holds by the configuration, standalone nodes behind the cells; where the engine is to say, at least one."""
    each = max(1, config.rollout.capacity)
    cells = [config.rollout.engines_per_cell * each] * config.cells.count
    return cells + [standalone_engines(config) * each] * config.cells.standalone


def training_cells(config: Config) -> int:
    """How many cells ever train: the first ones."""
    return config.schedule.trainers or config.cells.count


def engine_devices(config: Config) -> int:
    """Devices that every engine of a cell has, at least: its share, less where a node ends; one alone has those of its node."""
    found = cell_seats(config, standalone=False)
    return min((len(seat.devices) for seat in found if seat.devices), default=config.cells.ranks_per_node)


def check(config: Config) -> None:
    """Raises ConfigError for cells that can't be: who trains, how a cell trains, and its engines."""
    _check_trainers(config)
    _check_training(config)
    _check_engines(config)


def _check_trainers(config: Config) -> None:
    trainers, cells = config.schedule.trainers, config.cells.count
    if trainers is not None and trainers > cells:
        raise ConfigError(f"schedule.trainers = {trainers} with cells.count = {cells}", f"1 to {cells}, or null for all cells")
    if config.schedule.mode == "async" and config.cells.standalone == 0 and (trainers is None or trainers == cells):
        raise ConfigError(
            f"schedule.mode = async with schedule.trainers = {'null' if trainers is None else trainers}, cells.count = {cells}",
            "async needs cells that only roll out: set cells.standalone, or schedule.trainers below cells.count",
        )


def _check_training(config: Config) -> None:
    t, ranks = config.training, config.cells.nodes_per_cell * config.cells.ranks_per_node
    data = t.data_parallel or max(1, ranks // (t.tensor_parallel * t.pipeline_parallel))
    product = data * t.tensor_parallel * t.pipeline_parallel
    if product != ranks:
        raise ConfigError(
            f"training.data_parallel x tensor_parallel x pipeline_parallel = "
            f"{data} x {t.tensor_parallel} x {t.pipeline_parallel} = {product}, but a cell has "
            f"cells.nodes_per_cell x cells.ranks_per_node = {config.cells.nodes_per_cell} x {config.cells.ranks_per_node} = {ranks} ranks",
            f"the nearest that fit: {_nearest(ranks, t.tensor_parallel, t.pipeline_parallel)}",
        )
    for name in ("tensor_parallel", "pipeline_parallel"):
        if (size := getattr(t, name)) > 1:
            raise ConfigError(
                f"training.{name} = {size} is not supported: every rank of a cell computes whole layers",
                f"training.{name} = 1; the cell's {ranks} ranks share its rows (data parallel), and with ZeRO stage 3 the model",
            )


def _nearest(ranks: int, tensor: int, pipeline: int) -> str:
    """The split of `ranks` whose tensor and pipeline sizes are nearest to the wanted ones."""
    splits = [
        (ranks // (a * b), a, b) for a in range(1, ranks + 1) if ranks % a == 0 for b in range(1, ranks // a + 1) if ranks // a % b == 0
    ]
    data, a, b = min(splits, key=lambda split: (abs(split[1] - tensor) + abs(split[2] - pipeline), split[1], split[2]))
    return f"data_parallel = {data}, tensor_parallel = {a}, pipeline_parallel = {b}"


def _check_engines(config: Config) -> None:
    cells, rollout = config.cells, config.rollout
    devices = cells.nodes_per_cell * cells.ranks_per_node
    if rollout.engine == "vllm":
        wanted = _vllm_devices(rollout.options)
        if rollout.engines_per_cell > devices and cells.ranks_per_node > 1:
            raise ConfigError(
                f"rollout.engines_per_cell = {rollout.engines_per_cell}, but a cell has {devices} devices (cells.ranks_per_node each)",
                f"{devices} engines at most",
            )
        have = engine_devices(config)
        if wanted > have and wanted > 1:
            raise ConfigError(
                f"one vLLM engine wants {wanted} devices (tensor x pipeline parallel), but rollout.engines_per_cell = "
                f"{rollout.engines_per_cell} leaves it {have} of a cell's {cells.nodes_per_cell} nodes x {cells.ranks_per_node}",
                f"tensor-parallel-size = {have} or less; an engine stays on one node, cells.ranks_per_node is its number of devices",
            )
    elif rollout.capacity == 0 and not rollout.options.get("rows"):
        raise ConfigError(
            "rollout.capacity = 0 asks the engine, but the torch engine holds what it is told",
            "set rollout.capacity, or rollout.options.rows",
        )


def _vllm_devices(options: dict[str, Any]) -> int:
    """Devices of one vLLM engine, from its own command line options."""
    given = {name.replace("_", "-"): value for name, value in options.items()}
    product = 1
    for name in ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"):
        value = given.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"rollout.options.{name} = {value!r}", "a whole number from 1")
        product *= value
    return product


def waste(config: Config) -> list[str]:
    """Lines about what works and leaves devices or nodes idle in rollout; for a person to read."""
    cells, rollout = config.cells, config.rollout
    lines = []
    if rollout.engines_per_cell < cells.nodes_per_cell:
        lines.append(
            f"rollout.engines_per_cell = {rollout.engines_per_cell} for cells of {cells.nodes_per_cell} nodes: "
            f"{cells.nodes_per_cell - rollout.engines_per_cell} nodes of each cell have no engine"
        )
    used, nodes = _vllm_devices(rollout.options), min(rollout.engines_per_cell, cells.nodes_per_cell)
    if rollout.engine == "vllm" and used * rollout.engines_per_cell < nodes * cells.ranks_per_node:
        lines.append(
            f"rollout.engines_per_cell = {rollout.engines_per_cell} with {used} devices each use {used * rollout.engines_per_cell} of the "
            f"{nodes * cells.ranks_per_node} devices on their nodes (cells.ranks_per_node = {cells.ranks_per_node})"
        )
    return lines


def crowd(config: Config, cores: int) -> str | None:
    """One machine holds everything: a line when it is crowded. Raises ConfigError when nothing would ever get done."""
    cells = config.cells
    engines = cells.count * config.rollout.engines_per_cell + cells.standalone * standalone_engines(config)
    ranks = ranks_of(cells)
    line = f"{ranks} ranks and {engines} engines on {cores} cores (cells.count = {cells.count}, cells.standalone = {cells.standalone})"
    if ranks + engines > PROCESSES_PER_CORE * cores:
        raise ConfigError(
            f"{line}: more than {PROCESSES_PER_CORE} processes a core", "lower cells.count, or start inside a Slurm allocation"
        )
    return f"{line}: expect long waits" if ranks + engines > PROCESSES_PER_CORE // 8 * cores else None


def ranks_of(cells: CellsSection) -> int:
    """MPI ranks of a run without leftovers: the controller, the cells', one for each standalone node."""
    return 1 + cells.count * cells.nodes_per_cell * cells.ranks_per_node + cells.standalone
