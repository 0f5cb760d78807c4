"""The command line `gyre` (contract: names, exit codes and --json of docs/architecture.md).

Invariants: `gyre --help` imports nothing heavy (every command imports what it needs itself); an error is one line on standard error and the
exit code that goes with it; `status`, `report` and `trees` never change what a run recorded (but for `trees repair`) and never ask Slurm.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gyre_hpc import __version__
from gyre_hpc.commands import planning, trees
from gyre_hpc.commands.options import ConfigArgument, JsonOption, Overrides, PlainOption, RunArgument
from gyre_hpc.commands.places import configuration, run_of
from gyre_hpc.commands.terminal import print_json, show
from gyre_hpc.errors import ExitCode, GyreError

app = typer.Typer(
    name="gyre",
    help="Online reinforcement learning for agents on Slurm supercomputers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
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
        if not _here():
            _fail("the current folder is not there any more; cd to one that is", ExitCode.FAILED)
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
    plain: PlainOption = False,
) -> int:
    """Run, or continue, in the foreground: by mpiexec here, by srun inside a Slurm allocation."""
    from gyre_hpc.driver.driver import drive, write_report
    from gyre_hpc.driver.rundir import prepare
    from gyre_hpc.driver.signals import Signals

    paths = prepare(configuration(config, overrides))
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

    loaded = configuration(config, overrides)
    require_slurm()
    paths = prepare(loaded)
    job = submit_run(loaded, paths)
    told = {"job": job, "run": str(paths.root)}
    show(told, as_json, lambda _: f"job {job}; `gyre status {paths.root}` shows how far it is")


@app.command()
def sweep(
    config: ConfigArgument,
    overrides: Overrides = None,
    wait: Annotated[bool, typer.Option(help="Wait for all points and print a table of results.")] = True,
    as_json: JsonOption = False,
) -> int:
    """Submit one job array over the grid in `sweep.grid`; every point is a run of its own."""
    from gyre_hpc.driver import sweep as sweeping

    points = sweeping.plan(configuration(config, overrides))
    job = sweeping.submit_points(points)
    if not as_json:
        typer.echo(f"array {job} of {len(points)} points below {points[0].paths.root.parent}")
    rows = sweeping.wait(points, job) if wait else sweeping.results(points)
    if as_json:
        print_json({"job": job, "points": [row.as_dict() for row in rows]})
    elif wait:
        sweeping.print_table(rows)
    return int(sweeping.exit_code(rows)) if wait else int(ExitCode.DONE)


@app.command()
def status(run_dir: RunArgument, as_json: JsonOption = False) -> None:
    """Show how far a run is; reads files only."""
    from gyre_hpc.report.status import collect, render

    found = collect(run_of(run_dir))
    show(found, as_json, render)


@app.command()
def watch(run_dir: RunArgument) -> None:
    """Follow a run that another process drives, until it ends or Ctrl-C."""
    import threading

    from gyre_hpc.report.progress import watch as show

    stop = threading.Event()
    try:
        show(run_of(run_dir), stop)
    except KeyboardInterrupt:
        stop.set()


@app.command()
def report(run_dir: RunArgument, as_json: JsonOption = False) -> int:
    """Write RUN/report.html; reads files only, works while the run goes on. Exit 1 where damaged trees left something out."""
    paths = run_of(run_dir)
    from gyre_hpc.report.html import write

    missing = write(paths)
    show({"report": str(paths.report), "missing": list(missing)}, as_json, lambda _: str(paths.report))
    for line in missing:
        print(f"gyre: the report lacks what can't be read: {line}", file=sys.stderr, flush=True)
    return int(ExitCode.FAILED if missing else ExitCode.DONE)


@app.command()
def gateway(
    config: ConfigArgument,
    overrides: Overrides = None,
    host: Annotated[str | None, typer.Option("--host", help="Let other machines in, by this name of this one.")] = None,
    key: Annotated[list[str] | None, typer.Option("--key", metavar="NAME", help="Begin an execution to record by hand; print how.")] = None,
    harness: Annotated[str, typer.Option("--harness", help="For which program --key prints: claude-code, codex, ...")] = "command",
    plain: PlainOption = False,
) -> int:
    """Record alone, before inference servers of others (`upstream.urls`), until Ctrl-C; the same command goes on."""
    from gyre_hpc.gateway.standalone import run_gateway
    from gyre_hpc.gateway.trainer import known_harness

    loaded = configuration(config, overrides)
    return run_gateway(loaded, host, key or [], known_harness(harness), sys.stdout.isatty() and not plain)


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="Also what this configuration names: where it will run.")
    ] = None,
    overrides: Overrides = None,
    as_json: JsonOption = False,
) -> int:
    """Check what a run needs on this machine: one line each, with the remedy."""
    from gyre_hpc.doctor import examine, exit_code, render

    findings = examine(None if config is None else configuration(config, overrides))
    show(findings, as_json, render, lambda found: [finding.as_dict() for finding in found])
    return int(exit_code(findings))


app.command()(planning.simulate)
app.command()(planning.plan)
app.add_typer(trees.app, name="trees")


def _here() -> bool:
    """Whether the current folder is still there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _fail(line: str, code: ExitCode) -> None:
    if line:  # nothing where the help was the answer
        try:
            print(f"gyre: {' '.join(line.split())}", file=sys.stderr, flush=True)
        except OSError:  # nobody reads; the exit code still tells
            from gyre_hpc.driver.lines import mute

            mute(sys.stderr)
    sys.exit(int(code))


if __name__ == "__main__":
    main()
