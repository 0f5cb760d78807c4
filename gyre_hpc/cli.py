"""The command line `gyre` (contract: names, exit codes and --json of docs/architecture.md).

Invariants: `gyre --help` imports nothing heavy (every command imports what it needs itself); an error is one line on standard error and the
exit code that goes with it; `status`, `report` and `trees` never change what a run recorded (but for `trees repair`) and never ask Slurm.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gyre_hpc import __version__
from gyre_hpc.errors import ConfigError, ExitCode, GyreError
from gyre_hpc.simulation.handover import How

if TYPE_CHECKING:
    from gyre_hpc.config import Config
    from gyre_hpc.paths import RunPaths

app = typer.Typer(
    name="gyre",
    help="Online reinforcement learning for agents on Slurm supercomputers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
trees_app = typer.Typer(help="Look into trajectory trees; import and export them.", no_args_is_help=True)
app.add_typer(trees_app, name="trees")

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, or the directory of a run to continue.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Values that replace those of the file.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
PathArgument = Annotated[Path, typer.Argument(metavar="PATH", help="A run directory, or a folder of trees.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NodeMtbfOption = Annotated[float, typer.Option(min=0.0, help="Mean hours between failures of one node (0: none fails).")]
PreemptOption = Annotated[float, typer.Option(min=0.0, help="Hours after which an allocation ends (0: it doesn't).")]
RestartOption = Annotated[float, typer.Option(min=0.0, help="Minutes from a failure or an allocation's end to the next attempt.")]
SurviveOption = Annotated[bool, typer.Option("--executions-survive", help="Running executions go on in the next attempt.")]
CheckpointOption = Annotated[float, typer.Option(min=0.0, help="Seconds of a checkpoint, beside what a run's own took.")]
EngineMtbfOption = Annotated[float, typer.Option(min=0.0, help="Mean hours between deaths of one node's engine (0: none dies).")]
EngineStartOption = Annotated[float, typer.Option(min=0.0, help="Minutes until an engine that died is back.")]
HandoverOption = Annotated[How | None, typer.Option(help="How executions move with their context, for its cost (none: as recorded).")]
ContextOption = Annotated[float, typer.Option(min=0.0, help="Tokens that an execution holds when it moves.")]
KvBytesOption = Annotated[float, typer.Option(min=0.0, help="Bytes of KV of one token (nixl).")]
LinkOption = Annotated[float, typer.Option(min=0.0, help="GB/s that one node sends (nixl).")]
PrefillOption = Annotated[float, typer.Option(min=0.0, help="Tokens/s that one node computes (recompute).")]


Kind = TypeVar("Kind", bound=StrEnum)
_PATH = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP})
_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES})


def main() -> None:
    """Entry point: runs a command and turns errors into one line and an exit code."""
    try:
        code = app(standalone_mode=False)
    except GyreError as error:
        _fail(error.line, error.exit_code)
    except typer.Abort:
        _fail("interrupted", ExitCode.FAILED)
    except BrokenPipeError:  # `gyre ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.FAILED)
    except OSError as error:
        if error.errno in _PATH and error.filename:
            _fail(f"{error.filename}: {error.strerror}; give another path, or see what is in the way there", ExitCode.FAILED)
        if error.errno not in _DISK:
            raise
        where = f"{error.filename}: " if error.filename else ""
        _fail(
            f"{where}{error.strerror}; free some space or make it writable; the same command goes on",
            ExitCode.RESUMABLE,
        )
    except Exception as error:
        if not hasattr(error, "format_message"):  # a mistake of ours: the traceback is what helps
            raise
        message = error.format_message().rstrip(".")
        _fail(f"{message}; `--help` behind the command tells what it takes" if message else "", ExitCode.USAGE)  # click's usage errors
    sys.exit(code if isinstance(code, int) else ExitCode.DONE)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def init(
    name: Annotated[str, typer.Argument(help="Name of the run; NAME.yaml is written.")] = "myrun",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented configuration to start from."""
    from gyre_hpc.driver.template import write_template

    path = write_template(name, Path.cwd(), force)
    typer.echo(f"{path}: edit it, then `gyre run {path}`")


@app.command()
def run(
    config: ConfigArgument,
    overrides: Overrides = None,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live display.")] = False,
) -> int:
    """Run, or continue, in the foreground: by mpiexec here, by srun inside a Slurm allocation."""
    from gyre_hpc.driver.driver import drive, write_report
    from gyre_hpc.driver.rundir import prepare
    from gyre_hpc.driver.signals import Signals

    paths = prepare(_load(config, overrides))
    if sys.stdout.isatty() and not plain:
        from gyre_hpc.report.progress import watch as show

        code = drive(paths.root, watcher=show, signals=Signals(last=True))
    else:
        code = drive(paths.root, signals=Signals(last=True))
    if code == ExitCode.DONE:
        write_report(paths.root)
    return int(code)


@app.command()
def submit(config: ConfigArgument, overrides: Overrides = None, as_json: JsonOption = False) -> None:
    """Submit the run as a Slurm job that requeues and resumes by itself."""
    from gyre_hpc.driver.rundir import prepare
    from gyre_hpc.driver.submit import require_slurm, submit_run

    loaded = _load(config, overrides)
    require_slurm()
    paths = prepare(loaded)
    job = submit_run(loaded, paths)
    if as_json:
        _print_json({"job": job, "run": str(paths.root)})
    else:
        typer.echo(f"job {job}; `gyre status {paths.root}` shows how far it is")


@app.command()
def sweep(
    config: ConfigArgument,
    overrides: Overrides = None,
    wait: Annotated[bool, typer.Option(help="Wait for all points and print a table of results.")] = True,
    as_json: JsonOption = False,
) -> int:
    """Submit one job array over the grid in `sweep.grid`; every point is a run of its own."""
    from gyre_hpc.driver import sweep as sweeping

    points = sweeping.plan(_load(config, overrides))
    job = sweeping.submit_points(points)
    if not as_json:
        typer.echo(f"array {job} of {len(points)} points below {points[0].paths.root.parent}")
    rows = sweeping.wait(points, job) if wait else sweeping.results(points)
    if as_json:
        _print_json({"job": job, "points": [row.as_dict() for row in rows]})
    elif wait:
        sweeping.print_table(rows)
    return int(sweeping.exit_code(rows)) if wait else int(ExitCode.DONE)


@app.command()
def status(run_dir: RunArgument, as_json: JsonOption = False) -> None:
    """Show how far a run is; reads files only."""
    from gyre_hpc.report.status import collect, render

    found = collect(_run(run_dir))
    if as_json:
        _print_json(found)
    else:
        typer.echo(render(found))


@app.command()
def watch(run_dir: RunArgument) -> None:
    """Follow a run that another process drives, until it ends or Ctrl-C."""
    import threading

    from gyre_hpc.report.progress import watch as show

    stop = threading.Event()
    try:
        show(_run(run_dir), stop)
    except KeyboardInterrupt:
        stop.set()


@app.command()
def report(run_dir: RunArgument, as_json: JsonOption = False) -> None:
    """Write RUN/report.html; reads files only, works while the run goes on."""
    paths = _run(run_dir)
    from gyre_hpc.report.html import write

    write(paths)
    if as_json:
        _print_json({"report": str(paths.report)})
    else:
        typer.echo(str(paths.report))


@app.command()
def gateway(
    config: ConfigArgument,
    overrides: Overrides = None,
    host: Annotated[str | None, typer.Option("--host", help="Let other machines in, by this name of this one.")] = None,
    key: Annotated[list[str] | None, typer.Option("--key", metavar="NAME", help="Begin an execution to record by hand; print how.")] = None,
    harness: Annotated[str, typer.Option("--harness", help="For which program --key prints: claude-code, codex, ...")] = "command",
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live display.")] = False,
) -> int:
    """Record alone, before inference servers of others (`upstream.urls`), until Ctrl-C; the same command goes on."""
    from gyre_hpc.gateway.standalone import run_gateway
    from gyre_hpc.gateway.trainer import known_harness

    loaded = _load(config, overrides)
    return run_gateway(loaded, host, key or [], known_harness(harness), sys.stdout.isatty() and not plain)


@app.command()
def simulate(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="paper-122b, paper-24-nodes or paper-2.4t.")],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every row.")] = 20,
    picture: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a Gantt chart of every row there, as SVG.")] = None,
    node_mtbf: NodeMtbfOption = 0.0,
    preempt_every: PreemptOption = 0.0,
    restart: RestartOption = 10.0,
    executions_survive: SurviveOption = False,
    checkpoint: CheckpointOption = 0.0,
    engine_mtbf: EngineMtbfOption = 0.0,
    engine_start: EngineStartOption = 2.0,
    handover: HandoverOption = None,
    context_tokens: ContextOption = 0.0,
    kv_bytes: KvBytesOption = 0.0,
    link: LinkOption = 0.0,
    prefill: PrefillOption = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Simulate the paper's experiments with the scheduler of this system; reported numbers beside simulated ones."""
    from gyre_hpc.simulation.handover import hand_over
    from gyre_hpc.simulation.main import run_study
    from gyre_hpc.simulation.trouble import trouble

    kv = hand_over(handover, context_tokens, kv_bytes, link, prefill)
    expected = trouble(node_mtbf, preempt_every, restart, executions_survive, checkpoint, engine_mtbf, engine_start, kv)
    found, text = run_study(study, seeds, picture, _Progress(), expected)
    if as_json:
        _print_json(found)
    else:
        typer.echo(text)


@app.command()
def plan(
    path: Annotated[Path, typer.Argument(metavar="TRACE_OR_RUN", help="A run, or JSON lines with group and seconds of executions.")],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes to plan for.")],
    staleness: Annotated[float, typer.Option(min=0.0, help="Mean staleness allowed, updates.")] = 1.5,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every finalist.")] = 8,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps (the run's, or 24).")] = None,
    groups_per_step: Annotated[int | None, typer.Option(min=1, help="Groups of a step (the run's).")] = None,
    group_size: Annotated[int | None, typer.Option(min=1, help="Executions of a group (the run's, or 8).")] = None,
    slots_per_node: Annotated[float | None, typer.Option(min=0.01, help="Executions that one node's engines hold (the run's).")] = None,
    train_node_hours: Annotated[float | None, typer.Option(min=0.0, help="Training of one step (estimated from a run).")] = None,
    smallest_cell: Annotated[int | None, typer.Option(min=1, help="Nodes that hold the model in training (the run's, or 1).")] = None,
    beta: Annotated[float, typer.Option(min=0.0, help="Speed of an execution at a share u of slots in use: 1 / (1 + beta u).")] = 0.0,
    group_spread: Annotated[float | None, typer.Option(min=0.0, help="Sigma of log time in a group, for sessions (0.26).")] = None,
    node_mtbf: NodeMtbfOption = 0.0,
    preempt_every: PreemptOption = 0.0,
    restart: RestartOption = 10.0,
    executions_survive: SurviveOption = False,
    checkpoint: CheckpointOption = 0.0,
    engine_mtbf: EngineMtbfOption = 0.0,
    engine_start: EngineStartOption = 2.0,
    handover: HandoverOption = None,
    context_tokens: ContextOption = 0.0,
    kv_bytes: KvBytesOption = 0.0,
    link: LinkOption = 0.0,
    prefill: PrefillOption = 0.0,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a Gantt chart of the best one, as SVG.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Search for the cells, mode, mu, phi and standalone pool that suit a workload; in the simulator, nothing is run."""
    from gyre_hpc.simulation.facts import Given
    from gyre_hpc.simulation.handover import hand_over
    from gyre_hpc.simulation.main import run_plan
    from gyre_hpc.simulation.trouble import trouble

    given = Given(groups_per_step, group_size, steps, slots_per_node, train_node_hours, smallest_cell, beta, group_spread)
    kv = hand_over(handover, context_tokens, kv_bytes, link, prefill)
    expected = trouble(node_mtbf, preempt_every, restart, executions_survive, checkpoint, engine_mtbf, engine_start, kv)
    _warn_of_version(path)
    found, text = run_plan(path, given, nodes, staleness, seeds, picture, _Progress(), expected)
    if as_json:
        _print_json(found)
    else:
        typer.echo(text)


@app.command()
def doctor(as_json: JsonOption = False) -> int:
    """Check what a run needs on this machine: one line each, with the remedy."""
    from gyre_hpc.doctor import examine, exit_code, render

    findings = examine()
    if as_json:
        _print_json([finding.as_dict() for finding in findings])
    else:
        typer.echo(render(findings))
    return int(exit_code(findings))


# -- trees ----------------------------------------------------------------------------------------------------------------------
@trees_app.command("ls")
def trees_ls(path: PathArgument, as_json: JsonOption = False) -> None:
    """List the executions."""
    from gyre_hpc.report.trees import list_executions

    _table_or_json(list_executions(_trees(path)), as_json)


@trees_app.command("show")
def trees_show(
    path: PathArgument,
    execution: Annotated[str, typer.Argument(help="Which execution (see `gyre trees ls`).")],
    as_json: JsonOption = False,
) -> None:
    """Draw the tree of one execution."""
    from gyre_hpc.report.trees import describe_execution, render_execution

    found = describe_execution(_trees(path), execution)
    if as_json:
        _print_json(found)
    else:
        typer.echo(render_execution(found))


@trees_app.command("stats")
def trees_stats(
    path: PathArgument,
    executions: Annotated[bool, typer.Option("--executions", help="How the calls of each execution related to what was there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Executions, nodes, leaves, stored tokens, tokens if every path were expanded, and their ratio."""
    from gyre_hpc.report.trees import differences, statistics

    if executions:
        _table_or_json(differences(_trees(path)), as_json)
        return
    found = statistics(_trees(path))
    if as_json:
        _print_json(found)
    else:
        _pairs(found)


@trees_app.command("verify")
def trees_verify(path: PathArgument, as_json: JsonOption = False) -> int:
    """Read every chunk and check every invariant; exit 1 if something is broken."""
    from gyre_hpc.report.trees import verification

    found = verification(_trees(path))
    if as_json:
        _print_json(found)
    else:
        _pairs(found)
    return int(ExitCode.DONE if not found["problems"] else ExitCode.FAILED)


@trees_app.command("repair")
def trees_repair(path: PathArgument, as_json: JsonOption = False) -> None:
    """Make damaged trees usable again: what can't be read is set aside, and what is lost is named. While no run writes them."""
    from gyre_hpc.report.trees import mending

    found = mending(_trees(path))
    if as_json:
        _print_json(found)
    else:
        _pairs(found)


@trees_app.command("import")
def trees_import(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Session traces with block hashes, or sessions of Claude Code: a file, or a folder.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The store to make; must not exist.")],
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Whose tokens the text of sessions becomes; without it bytes.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a store of recorded sessions (their tokens are not those that were sampled: recordings hold hashes, or text)."""
    from gyre_hpc.imports.importer import import_recording

    found = import_recording(file, out, model).as_dict()
    if as_json:
        _print_json(found)
    else:
        _pairs(found)


@trees_app.command("export")
def trees_export(
    path: PathArgument,
    out: Annotated[Path, typer.Option("--out", metavar="OUT", help="The file to write (atif: the folder); replaced if it exists.")],
    form: Annotated[
        str,
        typer.Option("--format", metavar="FORMAT", help="jsonl: a line an execution; parquet: a row a path; atif: a file an execution."),
    ] = "jsonl",
    table: Annotated[
        str | None, typer.Option("--table", metavar="TABLE", help="Parquet: paths (as they are trained on), nodes, calls or executions.")
    ] = None,
    jmax: Annotated[
        int | None, typer.Option("--jmax", min=1, help="Parquet: most paths of an execution; without it every target is in one.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="ATIF: the model whose tokens they are, where no run says it.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write all trees, token by token, for other programs."""
    from gyre_hpc.exports.exporter import Format, Options, export
    from gyre_hpc.exports.rows import Table

    options = Options(_choice(Format, "--format", form), _choice(Table, "--table", table) if table else None, jmax, model)
    _warn_of_version(path)
    found = export(_trees(path), out, options)
    if as_json:
        _print_json(found)
    else:
        _pairs(found)


# -- helpers --------------------------------------------------------------------------------------------------------------------
def _load(config: Path, overrides: list[str] | None) -> Config:
    from gyre_hpc.configfile import load
    from gyre_hpc.driver.rundir import frozen
    from gyre_hpc.paths import RunPaths

    if config.is_dir():
        if not (config / "config.yaml").is_file():
            raise ConfigError(f"{config} is a folder without config.yaml", "give a YAML file, or the directory of a run to continue")
        # the folder that was named is meant, wherever it was when its configuration was frozen: a copy must not run its original
        frozen(RunPaths(config))  # what is wrong without the overrides is no matter of theirs
        loaded = load(config / "config.yaml", overrides or [])
        return loaded.model_copy(update={"run": loaded.run.model_copy(update={"dir": config})})
    return load(config, overrides or [])


def _run(run_dir: Path) -> RunPaths:
    from gyre_hpc.paths import RunPaths

    paths = RunPaths(run_dir)
    if not paths.config.exists():
        raise ConfigError(
            f"{run_dir} is not a run directory (no config.yaml in it)", "give the folder that `gyre run` made, for example runs/quickstart"
        )
    _warn_of_version(run_dir)
    return paths


def _warn_of_version(path: Path) -> None:
    """Of a run's configuration that this version reads in part only: who looks at it must not be refused, and not be misled."""
    from gyre_hpc.paths import RunPaths
    from gyre_hpc.viewing import see

    paths = RunPaths(path)
    warning = see(paths.config).warning if paths.config.exists() else None
    if warning is not None:
        print(f"gyre: {paths.root}: {warning}; what stands for them here are the defaults", file=sys.stderr, flush=True)


def _trees(path: Path) -> Path:
    """The folder of trees: that of a run, or the path itself."""
    from gyre_hpc.paths import RunPaths

    inside = RunPaths(path).trees
    folder = inside if inside.is_dir() else path
    if not folder.is_dir():
        raise ConfigError(f"{path} does not exist", "give a run directory, or a folder of trees")
    return folder


def _choice(kinds: type[Kind], option: str, value: str) -> Kind:
    try:
        return kinds(value)
    except ValueError:
        raise ConfigError(f"{option} {value}", f"one of {', '.join(kinds)}") from None


class _Progress:
    """What a long computation is at: a line a second for a person at a terminal, for anybody else one in ten seconds."""

    def __init__(self) -> None:
        self._each = 1.0 if sys.stderr.isatty() else 10.0
        self._told = time.monotonic() - (self._each if sys.stderr.isatty() else 0.0)

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if now - self._told >= self._each:
            print(f"... {line}", file=sys.stderr, flush=True)
            self._told = now


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, default=str))


def _pairs(found: dict[str, Any]) -> None:
    width = max(map(len, found), default=0)
    for key, value in found.items():
        typer.echo(f"{key:<{width}}  {value}")


def _table_or_json(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        _print_json(rows)
        return
    if not rows:
        typer.echo("nothing yet")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console = Console()
    if not console.is_terminal:  # a pipe has no width: nothing may be cut off
        console = Console(width=1000)
    console.print(table)


def _fail(line: str, code: ExitCode) -> None:
    if line:  # nothing where the help was the answer
        print(f"gyre: {' '.join(line.split())}", file=sys.stderr, flush=True)
    sys.exit(int(code))


if __name__ == "__main__":
    main()
