"""`RUN/report.html`: one self-contained file, readable in light and dark, made from the run's files alone.

Works on a run that still goes on or that died. Replaced atomically.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from gyre_hpc.events import read_events
from gyre_hpc.paths import RunPaths, naming
from gyre_hpc.report import roles, svg
from gyre_hpc.report.summary import Summary, duration, summarise
from gyre_hpc.report.trees import Survey, survey
from gyre_hpc.viewing import see

MOST_DOTS = 600
"""Executions whose scores are drawn."""
NOTHING = Survey()
_STYLE = Path(__file__).with_name("style.css")


def write(paths: RunPaths) -> tuple[str, ...]:
    """Make the report; what could not be read for it, a line each. OSError when it can't be written."""
    summary, trees = summarise(read_events(paths.events)), survey(paths.trees)
    page = render(paths, summary, trees)
    temporary = paths.report.with_name(f".report.{os.getpid()}.html")
    with naming(paths.report):
        try:
            temporary.write_text(page, encoding="utf-8")
            os.replace(temporary, paths.report)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    return trees.missing


def render(paths: RunPaths, summary: Summary, trees: Survey = NOTHING) -> str:
    """The page."""
    config = see(paths.config).config
    name = config.run.name or paths.root.name
    state = summary.ended or "running, or stopped without a word"
    attempts = "attempt" if len(summary.attempts) == 1 else "attempts"
    alone = bool(config.upstream.urls)
    sections = [
        _tiles(summary, None if alone else config.run.steps, trees.counts),
        *[_failure(event) for event in summary.failures[-1:] if summary.ended != "done"],
        *[_missing(trees.missing, paths) for _ in trees.missing[:1]],
        *(_recorded(summary) if alone else _trained(summary)),
        _section("How executions ended", _endings(summary)),
        _section("One trajectory tree", _tree(trees)),
        *([] if alone else [_section("Steps", _table(summary))]),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>gyre: {escape(name)}</title><style>{_STYLE.read_text(encoding='utf-8')}</style></head><body><main><h1>{escape(name)}</h1>"
        f'<p class="sub">{escape(state)} · {len(summary.attempts)} {attempts} · {duration(summary.ran)}</p>'
        f"{''.join(sections)}</main></body></html>\n"
    )


def _recorded(summary: Summary) -> list[str]:
    """Of a gateway alone: nobody trains here, so there are executions and nothing else."""
    unit, label = (3600.0, "hours") if summary.ran >= 7200 else (1.0, "seconds")
    dots = [(summary.worked(at) / unit, score) for at, score in summary.scores[:: _each(summary)]]
    chart = svg.line_chart([svg.Line("scores", "blue", dots, dots=True)], f"{label} that it recorded")
    return [_section("Scores", chart, f"Dots: {_dotted(summary)}, when they ended, as whoever trains has scored them.")]


def _trained(summary: Summary) -> list[str]:
    """What happened step by step."""
    return [
        _section(
            "Score per step",
            _scores(summary),
            f"Line: mean score of the executions that each step trained on. Dots: {_dotted(summary)}, between the steps where they ended.",
        ),
        _section("What every cell did", roles.draw(summary), *summary.placement),
        _section(
            "Role transfers",
            _transfers(summary),
            "The phases follow each other in the order in which they stand here; docs/architecture.md says what is true after each.",
        ),
        _section("Loss", _steps(summary, ("loss", "violet"))),
        _section(
            "Staleness",
            _steps(summary, ("staleness_mean", "amber"), ("token_staleness", "blue")),
            "Optimizer updates between dispatch (or sampling) and training, mean.",
        ),
        _section(
            "Tokens per step",
            _steps(summary, ("target_tokens", "green"), ("trained_tokens", "blue")),
            "Target: sampled tokens of the selected paths. Trained: all that was computed for those with a gradient, context included.",
        ),
    ]


def _section(title: str, body: str, *notes: str) -> str:
    tail = "".join(f'<p class="note">{escape(note[:1].upper() + note[1:])}</p>' for note in notes)
    return f"<section><h2>{escape(title)}</h2>{body}{tail}</section>"


def _failure(event: Mapping[str, Any]) -> str:
    return f'<section class="bad"><h2>Stopped</h2>{escape(event["what"])}<p class="note">{escape(event.get("remedy", ""))}</p></section>'


def _missing(lines: Sequence[str], paths: RunPaths) -> str:
    told = "".join(f"<div>{escape(line)}</div>" for line in lines)
    note = f"What is shown of trees is what can be read. `gyre trees verify {paths.root}` names every damage."
    return f'<section class="bad"><h2>Not all trees can be read</h2>{told}<p class="note">{escape(note)}</p></section>'


def _tiles(summary: Summary, steps: int | None, trees: Mapping[str, Any]) -> str:
    """`steps`: those that the run wants; None where nobody trains."""
    scores = [float(step["score_mean"]) for step in summary.steps]
    tiles = [("optimizer steps", f"{summary.step} of {steps}")] if steps is not None else []
    tiles.append(("executions ended", f"{sum(summary.endings.values()):,}"))
    if scores:
        few = max(1, min(5, len(scores) // 2))  # the two never overlap, unless it is one step
        first, last = scores[:few], scores[-few:]
        which = "first → last step" if few == 1 else f"first {few} → last {few} steps"
        tiles.append((f"mean score, {which}", f"{sum(first) / few:.2f} → {sum(last) / few:.2f}"))
    if steps is not None:
        tiles.append(("transfers while executions were live", f"{summary.live_transfers:,} of {len(summary.transfers):,}"))
    tiles.append(("tokens sampled", f"{summary.tokens:,}"))
    if "readable" in trees:
        tiles.append(("trees that can be read", f"{trees['readable']:,}"))
    elif trees:
        tiles.append(("stored / expanded tokens", f"{trees['stored_tokens']:,} / {trees['expanded_tokens']:,}"))
    return (
        '<div class="tiles">' + "".join(f'<div class="tile"><b>{escape(v)}</b><span>{escape(k)}</span></div>' for k, v in tiles) + "</div>"
    )


def _scores(summary: Summary) -> str:
    line = svg.Line("mean score of the step", "blue", [(float(step["step"]), float(step["score_mean"])) for step in summary.steps])
    sample = summary.scores[:: _each(summary)] if summary.steps else ()
    places = [float(x) for x in np.interp([at for at, _ in sample], *_clock(summary))]
    dots = [(x, score) for x, (_, score) in zip(places, sample, strict=True)]
    low, high = min((score for _, score in sample), default=0.0), max((score for _, score in sample), default=1.0)
    return svg.line_chart([svg.Line("single executions", "grey", dots, dots=True), line], svg.STEP, (min(0.0, low), max(1.0, high)))


def _each(summary: Summary) -> int:
    """One in so many executions is drawn."""
    return max(1, -(-len(summary.scores) // MOST_DOTS))


def _dotted(summary: Summary) -> str:
    each = _each(summary)
    return "single executions" if each == 1 else f"one in {each} of {len(summary.scores):,} executions"


def _clock(summary: Summary) -> tuple[list[float], list[float]]:
    """(seconds since the first event, step number) of the steps' ends, ascending; step 0 is the first execution's end."""
    ends = [(summary.scores[0][0] if summary.scores else 0.0, 0.0)]
    for step in summary.steps:
        ends.append((max(ends[-1][0], float(step["t"]) - summary.zero), float(step["step"])))
    return [at for at, _ in ends], [number for _, number in ends]


def _transfers(summary: Summary) -> str:
    if not summary.transfers:
        return '<p class="none">none yet</p>'
    rows = []
    for to in ("training", "rollout"):
        chosen = [t for t in summary.transfers if t.to == to]
        if not chosen:
            continue
        seconds = sorted(t.seconds for t in chosen)
        phases: dict[str, float] = {}
        for transfer in chosen:
            for phase, took in transfer.phases.items():
                phases[phase] = phases.get(phase, 0.0) + took / len(chosen)
        detail = ", ".join(f"{phase} {took:.3f}" for phase, took in phases.items())
        live, moved = sum(t.live > 0 for t in chosen), sum(t.moved for t in chosen)
        rows.append(
            f"<tr><td>to {to}</td><td>{len(chosen)}</td><td>{live}</td><td>{moved}</td><td>{seconds[len(seconds) // 2]:.3f}</td>"
            f"<td>{seconds[-1]:.3f}</td><td>{escape(detail)}</td></tr>"
        )
    names = ("", "transfers", "while live", "calls moved", "median s", "longest s", "mean s by phase")
    head = "<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"
    return f'<div class="scroll"><table class="words">{head}{"".join(rows)}</table></div>'


def _steps(summary: Summary, *series: tuple[str, str]) -> str:
    lines = [
        svg.Line(key.replace("_", " "), colour, [(float(s["step"]), float(s[key])) for s in summary.steps if s.get(key) is not None])
        for key, colour in series
    ]
    return svg.line_chart(lines, svg.STEP, height=180)


def _endings(summary: Summary) -> str:
    values = [(reason, float(count), "green" if reason == "finished" else "blue") for reason, count in summary.endings.items()]
    values += [(f"lost: {reason}", float(count), "pink") for reason, count in summary.lost.items()]
    values += [("warnings: forks", float(summary.warnings), "pink")] if summary.warnings else []
    return svg.bars(values)


def _tree(trees: Survey) -> str:
    drawing = trees.drawing
    if drawing is None:
        return f'<p class="none">{"none can be read" if trees.missing else "no tree yet"}</p>'
    entries = [("context", "grey"), ("sampled by the policy", "blue"), ("sampled, not delivered", "pink")]
    note = f'<p class="note">{escape(drawing.caption)}</p>'
    return svg.legend(entries) + svg.tree(drawing.nodes) + note


def _table(summary: Summary) -> str:
    keys = ("step", "score_mean", "loss", "staleness_mean", "executions", "target_tokens", "grad_norm", "clip_fraction", "cells", "seconds")
    head = "".join(f"<th>{key.replace('_', ' ')}</th>" for key in keys)
    rows = []
    for step in summary.steps:
        cells = "".join(f"<td>{_number(step.get(key))}</td>" for key in keys)
        rows.append(f"<tr>{cells}</tr>")
    return f'<div class="scroll tall"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _number(value: object) -> str:
    """Counts whole, anything else to four digits; empty for what an older log does not tell."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else ""
