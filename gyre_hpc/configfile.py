"""The file of a configuration: YAML with `extends:`, then `a.b.c=value` overrides, then a checked `Config`; and back.

Ordering key: the extended file, the file, the overrides from left to right; each is laid over what came before it. Invariants: what `dump`
writes, `load` reads back equal; a mistake is one `ConfigError` line with the key, the value, what is allowed and the nearest valid name;
nothing is taken in silence that YAML would take so (a key twice, a key without a blank behind its colon).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from gyre_hpc.config import Config, valid_keys
from gyre_hpc.crosscheck import cross_check
from gyre_hpc.errors import ConfigError

_DEEP, _FLAT = "is nested too deeply, or has an alias inside what it names", "write sections with keys, one level below the other"


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one section: YAML's own last word would drop the first one, a whole section maybe, in silence.

    A value that looks like a date or a number and is none (`2026-02-30`) is a `YAMLError` with its place, too; yaml has a bare ValueError.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(
                None, None, f"{str(node.value)[:40]!r} can't be read ({error})", node.start_mark
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else id(key)
            if key.tag != "tag:yaml.org,2002:merge" and name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands there twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `a.b.c=value` overrides, check everything. Raises ConfigError.

    A file may begin with `extends: other.yaml` (relative to itself): its own keys are laid over those of the other file.
    """
    tree = read_tree(path)
    for override in overrides:
        _apply(tree, override)
    config = check(tree, str(path))
    if not config.run.name:
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": path.stem})})
    return config


def read_tree(path: Path) -> dict[str, Any]:
    """The plain values of a file and of those that it extends, unchecked. Raises ConfigError where it is no YAML with sections."""
    return _read(path, ())


def _read(path: Path, below: tuple[Path, ...]) -> dict[str, Any]:
    """One file with what it extends; `below` are the files that lead here."""
    if path in below:
        raise ConfigError(f"config {path} extends itself", "take one `extends:` out")
    try:
        text = path.read_text(encoding="utf-8")  # whatever the locale of a login or a compute node is
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}", "give the path of a YAML file, for example configs/quickstart.yaml") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config {path} is not UTF-8 text", "give the path of a YAML file, for example configs/quickstart.yaml") from None
    try:
        tree = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"config {path} is not YAML: {error}", "mend the line that is named") from None
    except RecursionError:
        raise ConfigError(f"config {path} {_DEEP}", _FLAT) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"config {path} holds a {type(tree).__name__}", "write sections such as `run:` and `schedule:`")
    other = tree.pop("extends", None)
    if other is None:
        return tree
    if not isinstance(other, str) or "\0" in other:
        raise ConfigError(f"config {path}: extends = {other!r}", "give the path of one YAML file, relative to this one")
    return _laid_over(_read(path.parent / other, (*below, path)), tree)


def _laid_over(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on `base`: sections key by key, anything else whole."""
    both = dict(base)
    for key, value in over.items():
        below = both.get(key)
        both[key] = _laid_over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return both


def check(tree: Mapping[str, Any], origin: str) -> Config:
    """Validate a plain tree of values. Raises ConfigError with one line for the first mistake and the number of others."""
    try:
        glued, null = next(_glued(tree), None), next(_with_null(tree), None)
    except RecursionError:
        raise ConfigError(f"{origin} {_DEEP}", _FLAT) from None
    if null is not None:
        raise ConfigError(
            f"{origin}: {null!r} has a null character in it", "take it out: no path and no argument of a program can hold one"
        )
    if glued is not None:
        raise ConfigError(f"{origin}: {glued} is one key without a value", f"write a blank after the colon: {glued.replace(':', ': ', 1)}")
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        mistakes = error.errors()
        more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
        raise ConfigError(*_explain(mistakes[0], origin, more)) from None
    cross_check(config, origin)
    return config


def _glued(tree: Any) -> Iterator[str]:
    """Keys such as `A:1` of `{A:1}`: YAML wants a blank behind the colon there, and says nothing."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if value is None and isinstance(key, str) and re.fullmatch(r"[^\s:]+:\S+", key):
                yield key
            yield from _glued(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _glued(value)


def _with_null(tree: Any) -> Iterator[str]:
    """Texts, keys among them, that no system call takes."""
    if isinstance(tree, str):
        yield from (tree,) if "\0" in tree else ()
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _with_null(key)
            yield from _with_null(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _with_null(value)


def dump(config: Config, path: Path) -> None:
    """Write the complete configuration as YAML."""
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")


def _apply(tree: dict[str, Any], override: str) -> None:
    key, sep, text = override.partition("=")
    if not sep or not key:
        raise ConfigError(f"override {override!r} has no `=` behind a key", "write a.b.c=value, for example run.steps=40")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise ConfigError(f"override {key}: {text!r} is not a YAML value", "quote it") from None
    except RecursionError:
        raise ConfigError(f"override {key} {_DEEP}", _FLAT) from None
    *parents, leaf = key.split(".")
    at = tree
    for name in parents:
        nxt = at.setdefault(name, {})
        if nxt is None:
            nxt = at[name] = {}
        if not isinstance(nxt, dict):
            raise ConfigError(f"override {key}: {name} is not a section", f"valid keys: {', '.join(_keys_at(parents[:1]))}")
        at = nxt
    at[leaf] = value


def _keys_at(parents: Sequence[str | int]) -> list[str]:
    model: type[BaseModel] = Config
    for name in parents:
        info = model.model_fields.get(str(name))
        kind = info.annotation if info else None
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return []
        model = kind
    return list(model.model_fields)


def _explain(mistake: Any, origin: str, more: str) -> tuple[str, str]:
    where = ".".join(str(part) for part in mistake["loc"])
    if mistake["type"] == "extra_forbidden":
        *parents, name = mistake["loc"]
        here = _keys_at(parents)
        near = difflib.get_close_matches(str(name), here, 1, 0.5)
        prefix = ".".join([*map(str, parents), ""])
        elsewhere = [key for key in valid_keys() if key.rsplit(".", 1)[-1] == str(name)]
        guess = elsewhere[0] if elsewhere else f"{prefix}{near[0]}" if near else ""
        remedy = (f"did you mean {guess}? " if guess else "") + f"valid here: {', '.join(here)}"
        return f"{origin}: unknown key {where}{more}", remedy
    value = mistake.get("input")
    if mistake["type"] == "literal_error" and mistake["loc"][-1] == "[key]":  # of a section with a list of names: deadlines.phases
        return f"{origin}: unknown key {where.removesuffix('.[key]')}{more}", mistake["msg"].replace("Input should be", "valid here:", 1)
    if mistake["type"] == "model_type":  # a section whose keys are all commented out, mostly
        keys = ", ".join(_keys_at(mistake["loc"]))
        return (
            f"{origin}: {where} = {value!r}{more}",
            f"take the section out, or write keys below it: {keys}",
        )
    return f"{origin}: {where} = {value!r}{more}", mistake["msg"][0].lower() + mistake["msg"][1:]
