"""What is read of a Hugging Face directory: its tokenizer, its chat template, the tokens that end a turn.

Invariant: nothing is guessed; what is missing is one ConfigError with its remedy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gyre_hpc.errors import ConfigError

_NAMED = ("bos_token", "eos_token", "pad_token")


def load_tokenizer(directory: Path) -> Tokenizer:
    """The fast tokenizer of `directory`. Raises ConfigError."""
    path = directory / "tokenizer.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    if not directory.is_dir():
        raise ConfigError(f"model.path: {directory} does not exist", "give a Hugging Face causal-LM directory")
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(directory))
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer in {directory}: {error}", "put tokenizer.json there") from None
    backend: Tokenizer | None = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(f"the tokenizer of {directory} has no fast form", "convert it to tokenizer.json")
    return backend


def load_template(directory: Path) -> str:
    """The source of the chat template; of several, the one for tools. Raises ConfigError."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")  # a locale of one byte a character would make other tokens of it, in silence
    template = read_json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("tool_use") or named.get("default")
    if not isinstance(template, str) or not template:
        raise ConfigError(f"{directory} has no chat template", "put chat_template.jinja beside the tokenizer")
    return template


def load_specials(directory: Path) -> dict[str, str]:
    """The special tokens that templates name: variable -> text."""
    settings = read_json(directory / "tokenizer_config.json")
    found = {name: settings[name] for name in _NAMED if settings.get(name)}
    return {name: str(token["content"] if isinstance(token, dict) else token) for name, token in found.items()}


def load_stop_ids(directory: Path, tokenizer: Tokenizer, eos: str) -> tuple[int, ...]:
    """Ids of the tokens that end a turn; `eos`: the tokenizer's own, or "". Raises ConfigError."""
    files = (read_json(directory / name) for name in ("generation_config.json", "config.json"))
    ids = [i for file in files for i in _as_list(file.get("eos_token_id"))]
    own = tokenizer.token_to_id(eos)
    ids += [own] if own is not None else []
    if not ids:
        raise ConfigError(f"{directory} names no end-of-turn token", "set eos_token_id in generation_config.json")
    return tuple(dict.fromkeys(int(i) for i in ids))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is none."""
    if not path.exists():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}


def _as_list(value: Any) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]
