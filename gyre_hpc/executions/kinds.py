"""Known client programs: for each kind its command line, environment and the files in its HOME. Pure.

Source: design, harnesses.md. `stable` asks for the settings with which a client changes as little as it can of what it sent before (so that
trees stay narrow); without it a client runs as it comes. The gateway understands both. Every kind is told the policy's window, and the
tokens that one call may have, because clients compact by them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

INSTRUCTION = "{instruction}"
"""Stands for the task's text in `harness.argv`."""


@dataclass(frozen=True)
class Told:
    """What a client must know. `url`: http://host:port/prefix of the gateway; `window`, `max_tokens`: tokens."""

    url: str
    secret: str
    model: str
    window: int
    max_tokens: int
    instruction: str
    stable: bool = True


@dataclass(frozen=True)
class Launch:
    """`argv` behind the program's path; `env`; `files`: path below HOME -> text."""

    argv: Sequence[str]
    env: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """One client. `programs`: glob patterns below `harness.path`, the first that is there is it; `node`: run by node.

    `prompt`: tokens that its own first prompt has, about; measured with Qwen's vocabulary, 0 where nothing is known.
    """

    programs: tuple[str, ...]
    launch: Callable[[Told], Launch]
    node: bool = False
    version: tuple[str, ...] = ("--version",)
    prompt: int = 0


def claude_code(told: Told) -> Launch:
    """Anthropic Messages. The native binary; as it is no longer asked, permissions are skipped: the box is the permission."""
    env = {
        "ANTHROPIC_BASE_URL": told.url,
        "ANTHROPIC_API_KEY": told.secret,
        "ANTHROPIC_MODEL": told.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(told.window),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(told.max_tokens),
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }
    if told.stable:
        env |= {
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "DISABLE_PROMPT_CACHING": "1",
            "ENABLE_TOOL_SEARCH": "false",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
    return Launch(["-p", told.instruction, "--dangerously-skip-permissions"], env)


def codex(told: Told) -> Launch:
    """OpenAI Responses. Its own sandbox would be a box in a box: off."""
    config = f"""model = {json.dumps(told.model)}
model_provider = "gyre"
model_context_window = {told.window}
check_for_update_on_startup = false

[model_providers.gyre]
name = "gyre"
base_url = {json.dumps(told.url + "/v1")}
env_key = "OPENAI_API_KEY"
wire_api = "responses"

[analytics]
enabled = false
"""
    argv = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", told.instruction]
    return Launch(argv, {"OPENAI_API_KEY": told.secret}, {".codex/config.toml": config})


def qwen_code(told: Told) -> Launch:
    """OpenAI Chat Completions."""
    generation = {"contextWindowSize": told.window, "samplingParams": {"max_tokens": told.max_tokens}}
    settings = {
        "model": {"name": told.model, "generationConfig": generation},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"disableAutoUpdate": True},
    }
    argv = ["--auth-type", "openai", "--yolo", "-p", told.instruction]
    held = {"QWEN_STREAM_IDLE_TIMEOUT_MS": "0", "QWEN_STREAM_MAX_LIFETIME_MS": "0"}  # else four minutes: it does not see pings
    return Launch(argv, _openai(told) | held, {".qwen/settings.json": json.dumps(settings)})


def opencode(told: Told) -> Launch:
    """OpenAI Chat Completions, by a provider of the user's own."""
    limits = {"context": told.window, "output": told.max_tokens}
    config = {
        "model": f"gyre/{told.model}",
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
        "provider": {
            "gyre": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "gyre",
                "options": {"baseURL": f"{told.url}/v1", "apiKey": told.secret},
                "models": {told.model: {"name": told.model, "limit": limits}},
            }
        },
    }
    return Launch(["run", told.instruction], {}, {".config/opencode/opencode.json": json.dumps(config)})


def mini_swe_agent(told: Told) -> Launch:
    """OpenAI Chat Completions through LiteLLM, without streaming."""
    env = {
        "OPENAI_API_BASE": f"{told.url}/v1",
        "OPENAI_API_KEY": told.secret,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    config = ["-c", "mini.yaml", "-c", f"model.model_kwargs.max_tokens={told.max_tokens}"]
    return Launch(["-m", f"openai/{told.model}", *config, "-y", "--exit-immediately", "-t", told.instruction], env)


def command(told: Told) -> Launch:
    """Any program: it finds the gateway by the variables of all three families; `harness.argv` is its command line."""
    env = {"ANTHROPIC_BASE_URL": told.url, "ANTHROPIC_API_KEY": told.secret, "ANTHROPIC_MODEL": told.model, **_openai(told)}
    return Launch([], {**env, "MODEL_WINDOW": str(told.window), "MODEL_MAX_TOKENS": str(told.max_tokens)})


def _openai(told: Told) -> dict[str, str]:
    url = f"{told.url}/v1"
    return {"OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, "OPENAI_API_KEY": told.secret, "OPENAI_MODEL": told.model}


KINDS: Mapping[str, Kind] = {
    "claude-code": Kind(("node_modules/@anthropic-ai/claude-code-*/claude", "bin/claude", "claude"), claude_code, prompt=20_000),
    "codex": Kind(
        ("node_modules/@openai/codex-*/vendor/*/bin/codex", "node_modules/@openai/codex-*/vendor/*/codex/codex", "bin/codex", "codex"),
        codex,
    ),
    "qwen-code": Kind(("node_modules/@qwen-code/qwen-code/cli.js", "node_modules/.bin/qwen", "bin/qwen"), qwen_code, node=True),
    "opencode": Kind(("node_modules/opencode-*-x64/bin/opencode", "node_modules/opencode-*/bin/opencode", "bin/opencode"), opencode),
    "mini-swe-agent": Kind(("bin/mini",), mini_swe_agent, version=("--help",)),
    "command": Kind((), command, version=()),
}
