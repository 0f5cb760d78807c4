"""Demonstrations for the warm-up of the small policy: conversations as the bundled harness holds them.

The demonstrator is *careless*: its calls are always well-formed, but at each part it does the right thing only with probability
`care`; otherwise it takes another command, another argument, the arguments in the wrong order, or stops. So the policy knows the dialect
and holds the right behaviour within its distribution, yet scores low: what is left is for reinforcement learning to find.
*Drills* are short, always right, and have no system prompt: copying an argument from the instruction is what is hard to learn.

A conversation is a list of messages as the chat template takes them (`role`, `content`, `tool_calls`); every assistant message is a target.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from gyre_hpc.harness import texts
from gyre_hpc.policy.shell import Shell
from gyre_hpc.tasks.chores import KINDS, NAMES, NUMBERS, Chore, Part, draw_demonstrated

Message = dict[str, Any]
Conversation = list[Message]

FINAL = "Done."


@dataclass(frozen=True)
class Habits:
    """Probabilities of a demonstrator. `care`: a part is done right; the rest is shared by the four mistakes in these weights."""

    care: float = 0.14
    wrong_kind: float = 0.4
    wrong_argument: float = 0.4
    swapped: float = 0.1
    stops: float = 0.1
    compaction: float = 0.15
    sub_agent: float = 0.15


def tools_for_template() -> list[dict[str, Any]]:
    """The harness's tools in the form that chat templates take (OpenAI function style)."""
    return [
        {"type": "function", "function": {"name": t["name"], "description": t["description"], "parameters": t["input_schema"]}}
        for t in texts.TOOLS
    ]


def call_of(part: Part) -> tuple[str, dict[str, str]]:
    """The tool call (name, arguments) that does a part."""
    if part.kind == "create":
        return "write_file", {"path": part.a, "content": part.b}
    return "bash", {"command": part.shell}


def assistant_call(number: int, part: Part) -> Message:
    """An assistant turn that says the step's number and makes its call."""
    name, arguments = call_of(part)
    return {
        "role": "assistant",
        "content": f"{number}.",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def drill(rng: random.Random, parts: int) -> Conversation:
    """A right and short conversation without system prompt and tool results: the instruction, then one call after the other."""
    chore = draw_demonstrated(rng, parts)
    conversation: Conversation = [{"role": "user", "content": chore.instruction}]
    conversation += [assistant_call(number, part) for number, part in enumerate(chore.parts, 1)]
    return conversation


def demonstrate(rng: random.Random, habits: Habits, difficulty: int) -> list[Conversation]:
    """One execution as the harness would hold it: the main conversation, before it those that a compaction or a sub-agent split off."""
    chore = draw_demonstrated(rng, difficulty)
    shell = Shell(chore.initial)
    lines = chore.instruction.split("\n")
    conversations: list[Conversation] = []
    prompt, parts = chore.instruction, chore.parts
    if difficulty > 1 and rng.random() < habits.sub_agent:
        sub = _opening(texts.SUB_AGENT_SYSTEM, texts.sub_agent_prompt(lines[-1]))
        _work(rng, habits, sub, Chore(parts[-1:]), shell, first=difficulty, stop_before=difficulty + 1)
        sub.append({"role": "assistant", "content": FINAL})
        conversations.append(sub)
        prompt, parts = texts.delegated_prompt("\n".join(lines[:-1]), FINAL), parts[:-1]
    main = _opening(texts.SYSTEM, prompt)
    done = 0
    if rng.random() < habits.compaction:
        cut = rng.randint(1, len(parts))
        done = _work(rng, habits, main, Chore(parts), shell, first=1, stop_before=cut + 1)
        if done:
            summary = f"Step {done}."
            conversations.append([*main, {"role": "user", "content": texts.COMPACT}, {"role": "assistant", "content": summary}])
            main = _opening(texts.SYSTEM, texts.compacted_prompt(prompt, summary))
    _work(rng, habits, main, Chore(parts[done:]), shell, first=done + 1, stop_before=len(parts) + 1)
    main.append({"role": "assistant", "content": FINAL})
    return [*conversations, main]


def _opening(system: str, prompt: str) -> Conversation:
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt}]


def _work(rng: random.Random, habits: Habits, conversation: Conversation, chore: Chore, shell: Shell, first: int, stop_before: int) -> int:
    """Append turns for the parts numbered `first`.. below `stop_before`; returns the number of the last one that was tried (0: none)."""
    tried = 0
    for number, part in enumerate(chore.parts, first):
        if number >= stop_before:
            break
        mistaken = _mistake(rng, habits, chore, part)
        if mistaken is None:
            break
        name, arguments = call_of(mistaken)
        conversation.append(assistant_call(number, mistaken))
        conversation.append({"role": "tool", "content": shell.call(name, arguments)})
        tried = number
    return tried


def _mistake(rng: random.Random, habits: Habits, chore: Chore, part: Part) -> Part | None:
    """The part as the demonstrator does it: right, another one, or not at all (None)."""
    if rng.random() < habits.care:
        return part
    weights = [habits.wrong_kind, habits.wrong_argument, habits.swapped, habits.stops]
    match rng.choices(("kind", "argument", "swapped", "stops"), weights)[0]:
        case "kind":
            return Part(rng.choice([kind for kind in KINDS if kind != part.kind]), part.a, part.b, part.before)
        case "argument":
            return _wrong_argument(rng, chore, part)
        case "swapped":
            return Part(part.kind, part.b, part.a, part.before)
        case _:
            return None


def _wrong_argument(rng: random.Random, chore: Chore, part: Part) -> Part:
    others = [name for other in chore.parts for name in sorted(other.names - part.names)]
    name = rng.choice(others) if others and rng.random() < 0.5 else rng.choice(NAMES)
    if KINDS[part.kind].second == "number":
        if rng.random() < 0.5:
            return Part(part.kind, part.a, rng.choice(NUMBERS), part.before)
        return Part(part.kind, name, part.b, part.before)
    if rng.random() < 0.5:
        return Part(part.kind, part.a, name, part.before)
    return Part(part.kind, name, part.b, part.before)
