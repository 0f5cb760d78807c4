"""What the controller announces to the cells, in epoch order: frozen messages and their plain-dict form.

Ordering key: the epoch of the channel (cells/epochs.py). Every rank sees every message in the same order. `Work` and `Share` are told and
done with; `Command` is a question to one leader (cells/lines.py), beside the epochs; every other message is over when every leader has
acknowledged it. A micro-step names rows, it does not carry them: each cell repeats the seeded selection and reads the tokens from RUN/trees
by itself.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class RowRef:
    """One selected path: `path` is its place in `trees.selection.select_paths(execution)`; `advantage` of its execution.

    `branch`: its tokens' versions after this one are of weights that a resume gave up (gyre_hpc/branches.py).
    """

    execution: int
    path: int
    advantage: float
    branch: int | None = None


@dataclass(frozen=True)
class Work:
    """Micro-steps `first`, `first + 1`, ... of the open step (numbered from 0); any training cell may claim each, once."""

    first: int
    items: tuple[tuple[RowRef, ...], ...]


@dataclass(frozen=True)
class Share:
    """From a cell's leader to its other ranks: micro-step `item` is claimed; each takes the rows of its slot."""

    item: int


@dataclass(frozen=True)
class Start:
    """First message of an attempt: the core restores the checkpoint of `step` (0: fresh) and reports the version it holds."""

    step: int


@dataclass(frozen=True)
class Prefix:
    """The first `cells` cells are in training from here on."""

    cells: int


@dataclass(frozen=True)
class Command:
    """To one cell: a part of a phase of its transfer (transfers.py), within `seconds`.

    release: the engines free their memory. load: they have the weights `weights` of `version`, those that died are started again. resume,
    pause: they serve, or not. where: nothing, but where they are. restore: the training state is on the device, with the core's weights.
    offload: it has left the device. lend: the core sends its weights to `cell`. withdraw: it offers them no more, and answers what it has
    `sent`. revive: engines that died are started again. Answered by {engines} where they may have moved, or {failed: why}.
    """

    what: str
    version: int
    weights: str
    seconds: float
    cell: int = -1


@dataclass(frozen=True)
class Close:
    """Step `step` has `items` micro-steps: the first `prefix` cells finish them and reduce to the core.

    The core divides by `executions`, steps, and checkpoints where `checkpoint` says so (`fields` and `state` go into the checkpoint).
    `refresh`: the burst goes on, so training satellites pull the new weights.
    """

    step: int
    items: int
    prefix: int
    executions: int
    refresh: bool
    checkpoint: bool
    fields: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Save:
    """The core writes a checkpoint of step `step`, which is over, within `seconds`: the attempt is about to stop."""

    step: int
    fields: dict[str, Any]
    state: dict[str, Any]
    seconds: float


@dataclass(frozen=True)
class Export:
    """The core writes its weights as a Hugging Face directory; `offer`: and offers them from memory, its leader reports {source}.

    direct: to each engine that asks. broadcast: to `engines` engines at once. "": not at all.
    """

    version: int
    weights: str
    offer: str = ""
    engines: int = 0


@dataclass(frozen=True)
class Update:
    """The engines of `cells` take these weights: from `source` if there is one, else, and where that fails, from files."""

    version: int
    weights: str
    cells: tuple[int, ...]
    source: str = ""


@dataclass(frozen=True)
class Stop:
    """The last message of an attempt."""

    reason: str


Message = Work | Share | Start | Prefix | Command | Close | Save | Export | Update | Stop
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Work, Share, Start, Prefix, Command, Close, Save, Export, Update, Stop)}


def encode(message: Message) -> dict[str, Any]:
    """A JSON-able dict."""
    return {"kind": type(message).__name__, **asdict(message)}


def decode(data: dict[str, Any]) -> Message:
    """The inverse of `encode`. ValueError on an unknown kind."""
    fields = dict(data)
    kind = _KINDS.get(fields.pop("kind", ""))
    if kind is None:
        raise ValueError(f"unknown message kind {data.get('kind')!r}; known: {', '.join(_KINDS)}")
    if kind is Work:
        items = tuple(tuple(RowRef(**row) for row in item) for item in fields["items"])
        return Work(first=fields["first"], items=items)
    if kind is Update:
        fields["cells"] = tuple(fields["cells"])
    message: Message = kind(**fields)
    return message
