"""A set of options is one dataclass, and the command line sees its fields."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from gyre_hpc.commands.options import TroubleOptions, check_numbers, unfolded
from gyre_hpc.commands.planning import plan, simulate
from gyre_hpc.errors import ConfigError
from gyre_hpc.simulation.trouble import NO_TROUBLE


@dataclass(frozen=True)
class Weather:
    wind: Annotated[float, typer.Option(min=0.0, help="Speed.")] = 1.5
    rain: Annotated[bool, typer.Option("--wet")] = False


def test_fields_stand_where_the_set_stood_and_come_back_as_the_set() -> None:
    app, seen = typer.Typer(), []

    @app.command()
    @unfolded
    def sail(name: Annotated[str, typer.Argument()], weather: Weather = Weather(), late: bool = False) -> None:
        seen.append((name, weather, late))

    run = CliRunner().invoke
    assert run(app, ["a"]).exit_code == 0
    assert run(app, ["b", "--wind", "3", "--wet", "--late"]).exit_code == 0
    assert seen == [("a", Weather(), False), ("b", Weather(3.0, True), True)]
    text = run(app, ["--help"]).stdout
    assert text.index("--wind") < text.index("--wet") < text.index("--late")
    assert run(app, ["c", "--wind", "-1"]).exit_code == 2


def test_a_field_without_a_default_is_refused() -> None:
    @dataclass(frozen=True)
    class Bare:
        wind: float

    def sail(weather) -> None:  # type: ignore[no-untyped-def]
        raise AssertionError(weather)

    sail.__annotations__["weather"] = Bare
    with pytest.raises(TypeError, match=r"Bare\.wind is an option without a default"):
        unfolded(sail)


@pytest.mark.parametrize("command", [simulate, plan])
def test_every_option_of_trouble_is_one_of_the_command(command: object) -> None:
    app = typer.Typer()
    app.command()(command)  # type: ignore[type-var]
    names = {parameter.name for parameter in typer.main.get_command(app).params}
    assert {field.name for field in fields(TroubleOptions)} <= names


def test_no_option_is_no_trouble_and_one_without_effect_is_refused() -> None:
    assert TroubleOptions().trouble() == NO_TROUBLE
    with pytest.raises(ConfigError, match="give --node-mtbf or --preempt-every"):
        TroubleOptions(executions_survive=True).trouble()


@pytest.mark.parametrize("value", [float("inf"), 1e308, float("nan")])
def test_a_number_that_no_arithmetic_is_made_for_is_refused(value: float) -> None:
    check_numbers(node_mtbf=1e12, restart=0.0, executions_survive=True, handover=None)
    with pytest.raises(ConfigError, match=r"--node-mtbf .*; give at most 1e\+12"):
        TroubleOptions(node_mtbf=value).trouble()


def test_a_plan_refuses_it_too() -> None:
    app = typer.Typer()
    app.command()(plan)
    for option in ("--beta", "--staleness", "--slots-per-node", "--train-node-hours", "--group-spread"):
        said = CliRunner().invoke(app, ["nowhere", "--nodes", "1", option, "inf"]).exception
        assert str(said) == f"{option} inf; give at most 1e+12"
