"""A model directory with a real vocabulary and a ChatML template, for measurements; no weights.

`directory()` converts the vocabulary of Qwen (151,643 byte-level entries, in the PyPI package `dashscope`, fetched with pip when it is
first asked for) to a Hugging Face tokenizer.json under ~/.cache/gyre_hpc. Where the registry does not answer, a vocabulary is trained on
the standard library's sources, and its name says so. Nothing of it is part of the repository.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

PACKAGE, MEMBER = "dashscope==2.0.2", "dashscope/resources/qwen.tiktoken"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gyre_hpc"
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TRAINED = 30_000
TEMPLATE = """
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
{{- '# Tools\\n\\nYou may call one or more functions.\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}{{- '\\n</tools><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{%- if not loop.first or message.content -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def directory() -> Path:
    """The model directory, made once."""
    for name, make in (("vocabulary-qwen", _qwen), ("vocabulary-trained", _trained)):
        path = CACHE / name
        if (path / "tokenizer.json").exists():
            return path
        try:
            tokenizer = make()
        except (subprocess.SubprocessError, OSError) as error:
            print(f"{name} can't be had ({error}); the next one", file=sys.stderr)
            continue
        return _save(tokenizer, path)
    raise SystemExit("no vocabulary")


def corpus(limit: int = 8_000_000) -> str:
    """Real text: sources of the standard library, `limit` characters of it at most."""
    parts: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(path.read_text(errors="replace"))
        size += len(parts[-1])
        if size > limit:
            break
    return "\n".join(parts)[:limit]


def _save(tokenizer: Tokenizer, path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "config.json").write_text("{}")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id("<|im_end|>")}))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def _shell(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _finish(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return tokenizer


def _qwen() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", "-d", folder, PACKAGE]
        subprocess.run(command, check=True, timeout=120)
        (wheel,) = Path(folder).glob("*.whl")
        lines = zipfile.ZipFile(wheel).read(MEMBER).split(b"\n")
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    letters = _letters()
    merges = []
    for token, rank in ranks.items():
        if len(token) > 1:
            left, right = _parts(ranks, token, rank)
            merges.append((_spell(left, letters), _spell(right, letters)))
    return _finish(_shell(models.BPE({_spell(token, letters): rank for token, rank in ranks.items()}, merges)))


def _parts(ranks: dict[bytes, int], token: bytes, most: int) -> tuple[bytes, bytes]:
    """The two tokens from which `token` was merged: byte-pair encoding of it with all earlier merges."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, most) for a, b in itertools.pairwise(parts)]
        best = min(pairs)
        if best >= most:
            break
        at = pairs.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    left, right = parts
    return left, right


def _trained() -> Tokenizer:
    tokenizer = _shell(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    text = corpus()
    trainer: Any = trainers.BpeTrainer(vocab_size=TRAINED, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(re.findall(r"(?s).{1,10000}", text), trainer)
    return _finish(tokenizer)


def _letters() -> list[str]:
    """The letter by which each byte is written in a byte-level vocabulary (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shown = {byte: chr(byte) for byte in plain}
    others = (byte for byte in range(256) if byte not in shown)
    shown.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return [shown[byte] for byte in range(256)]


def _spell(token: bytes, letters: list[str]) -> str:
    return "".join(letters[byte] for byte in token)
