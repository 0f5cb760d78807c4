"""A pretended workspace for demonstrations: the handful of commands that they use, with the answers that the real tools give.

Only the recipe and the offline benchmark use it (a process per command would cost most of the warm-up); tests hold it against bash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre_hpc.harness import texts

_MISSING = "No such file or directory"


class Shell:
    """Files of one workspace (name -> text) and the two tools of the bundled harness on them."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = dict(files)

    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Run one tool call; returns what the harness would send back."""
        if tool == "write_file" and {"path", "content"} <= set(arguments):
            self.files[str(arguments["path"])] = str(arguments["content"])
            return texts.tool_result("", 0)
        if tool == "bash" and "command" in arguments:
            errors = self._command(str(arguments["command"]))
            return texts.tool_result("\n".join(errors), 1 if errors else 0)
        return texts.tool_result(f"no tool {tool} with these arguments", 1)

    def _command(self, command: str) -> list[str]:
        match command.split():
            case ["echo", word, ">", name]:
                self.files[name] = f"{word}\n"
            case ["echo", word, ">>", name]:
                self.files[name] = self.files.get(name, "") + f"{word}\n"
            case ["cp" | "mv" as verb, source, target]:
                return self._move(verb, source, target)
            case ["rm", *names] if names:
                errors = []
                for name in names:
                    if self.files.pop(name, None) is None:
                        errors.append(f"rm: cannot remove '{name}': {_MISSING}")
                return errors
            case _:
                return [f"{command}: not known here"]
        return []

    def _move(self, verb: str, source: str, target: str) -> list[str]:
        if source not in self.files:
            return [f"{verb}: cannot stat '{source}': {_MISSING}"]
        if source == target:
            return [f"{verb}: '{source}' and '{target}' are the same file"]
        self.files[target] = self.files[source]
        if verb == "mv":
            del self.files[source]
        return []
