"""What an earlier gateway recorded of an execution that still lives, as a recorder needs it to go on.

Invariant: no request is judged differently for a restart in between, and a finished call that is asked again gets the recorded answer.

Read from the journal (trees): nodes, intents and ends of calls, and their boundaries (notes.py). Calls without an end are lost: nobody got
their answer from us, a retry of one is a new call, and the tree stays incomplete. A journal from before there were boundaries has none: its
executions go on, but known turns are taken for new text.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gyre_hpc.gateway.notes import Answered, Asked
from gyre_hpc.gateway.roles import History
from trees.forest import Forest
from trees.matching import Match
from trees.records import CallEnd, Fate
from trees.tree import Call

log = logging.getLogger(__name__)


@dataclass
class Past:
    """One execution. `calls` made, `tokens` sampled, `lost` calls; `nodes`: id -> (parent, int32 tokens); `places`: ends of answers."""

    calls: int = 0
    tokens: int = 0
    lost: int = 0
    nodes: dict[int, tuple[int, NDArray[np.int32]]] = field(default_factory=dict)
    history: History = field(default_factory=History)
    places: list[Match] = field(default_factory=list)
    delivered: dict[bytes, Call] = field(default_factory=dict)
    """Digest of a request's body -> the call that answered it."""
    silent: dict[bytes, CallEnd] = field(default_factory=dict)
    """Those of them whose answer said nothing (it ends where the prompt ends), or whose place was not written down before the end came:
    asked again, they are superseded."""


def read_past(forest: Forest, execution: int) -> Past:
    """What the journal holds of this execution. KeyError: it is not in the journal."""
    past = Past(nodes={node: (forest.nodes[node].parent, forest.nodes[node].tokens) for node in forest.closure(execution)})
    for call in forest.calls(execution):
        past.calls += 1
        past.lost += call.fate is None
        if call.sampled >= 0:
            past.tokens += len(forest.nodes[call.sampled].tokens)
            if call.fate is Fate.DELIVERED:
                past.delivered[call.digest] = call
    _read_boundaries(forest, execution, past)
    return past


def _read_boundaries(forest: Forest, execution: int, past: Past) -> None:
    asked: dict[int, Asked] = {}
    answered: set[int] = set()
    for boundary in forest.boundaries.get(execution, {}).values():
        try:
            if boundary.node == forest.intents[boundary.call].prompt:
                asked[boundary.call] = Asked.of(boundary)
                past.history.note(asked[boundary.call])
            else:
                past.history.delivered(Answered.of(boundary, asked[boundary.call]))
                answered.add(boundary.call)
                end = forest.call_ends[boundary.call]
                if end.fate is not Fate.SUPERSEDED:
                    past.places.append(Match(boundary.depth, boundary.node, boundary.digest))
                if boundary.digest == asked[boundary.call].prompt and end.fate is Fate.DELIVERED:
                    past.silent[forest.intents[boundary.call].digest] = end
        except (ValueError, TypeError, KeyError) as error:  # written by another version: the turn is taken for new text
            log.warning("execution %d: the boundary of call %d can't be read: %s", execution, boundary.call, error)
    for call in [*past.delivered.values()]:
        if call.call in asked and call.call not in answered:
            past.silent[call.digest] = forest.call_ends[call.call]  # told again, it would come back as text that nobody knows
