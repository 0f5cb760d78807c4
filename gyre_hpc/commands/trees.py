"""`gyre trees`: look into trajectory trees, mend, import and export them.

Invariant: `repair` alone changes what a run recorded. Every command imports what it needs itself.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from gyre_hpc.commands.options import JsonOption, PathArgument
from gyre_hpc.commands.places import trees_of, warn_of_version
from gyre_hpc.commands.terminal import pairs, show, show_rows
from gyre_hpc.errors import ConfigError, ExitCode

app = typer.Typer(help="Look into trajectory trees; import and export them.", no_args_is_help=True)


@app.command("ls")
def trees_ls(path: PathArgument, as_json: JsonOption = False) -> None:
    """List the executions."""
    from gyre_hpc.report.trees import list_executions

    show_rows(list_executions(trees_of(path)), as_json)


@app.command("show")
def trees_show(
    path: PathArgument,
    execution: Annotated[str, typer.Argument(help="Which execution (see `gyre trees ls`).")],
    as_json: JsonOption = False,
) -> None:
    """Draw the tree of one execution."""
    from gyre_hpc.report.trees import describe_execution, render_execution

    found = describe_execution(trees_of(path), execution)
    show(found, as_json, render_execution)


@app.command("stats")
def trees_stats(
    path: PathArgument,
    executions: Annotated[bool, typer.Option("--executions", help="How the calls of each execution related to what was there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Executions, nodes, leaves, stored tokens, tokens if every path were expanded, and their ratio."""
    from gyre_hpc.report.trees import differences, statistics

    if executions:
        show_rows(differences(trees_of(path)), as_json)
        return
    found = statistics(trees_of(path))
    show(found, as_json, pairs)


@app.command("verify")
def trees_verify(path: PathArgument, as_json: JsonOption = False) -> int:
    """Read every chunk and check every invariant; exit 1 if something is broken."""
    from gyre_hpc.report.trees import verification

    found = verification(trees_of(path))
    show(found, as_json, pairs)
    return int(ExitCode.DONE if not found["problems"] else ExitCode.FAILED)


@app.command("repair")
def trees_repair(path: PathArgument, as_json: JsonOption = False) -> None:
    """Make damaged trees usable again: what can't be read is set aside, and what is lost is named. While no run writes them."""
    from gyre_hpc.report.trees import mending

    found = mending(trees_of(path))
    show(found, as_json, pairs)


@app.command("import")
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
    show(found, as_json, pairs)


@app.command("export")
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
    warn_of_version(path)
    found = export(trees_of(path), out, options)
    show(found, as_json, pairs)


Kind = TypeVar("Kind", bound=StrEnum)


def _choice(kinds: type[Kind], option: str, value: str) -> Kind:
    try:
        return kinds(value)
    except ValueError:
        raise ConfigError(f"{option} {value}", f"one of {', '.join(kinds)}") from None
