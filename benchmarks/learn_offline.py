"""Can the small policy learn within the quickstart's budget? The whole loop in one process: no HTTP, no sandboxes, no cells.

    python benchmarks/learn_offline.py [--config configs/quickstart.yaml] [--seeds 0,1,2] [--model DIR] [a.b.c=value ...]

Rollout is batched sampling with a KV cache; executions follow the bundled harness (sub-agent, compaction) on a pretended shell; training
uses the objective, selection weights and advantages of the real run. Weights that sample are `--stale` updates old. Prints one line a
step: sampled mean score, well-formed turns, clip fraction, CPU seconds of rollout and training; at the end first-3 and last-5 means.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from gyre_hpc.config import BUILTIN_MODEL, Config
from gyre_hpc.configfile import load
from gyre_hpc.harness import texts
from gyre_hpc.policy import recipe, transcripts
from gyre_hpc.policy.shell import Shell
from gyre_hpc.tasks.chores import Chore, draw
from gyre_hpc.training.loss import Objective, objective
from trees.advantages import group_advantages

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass
class Path_:
    """One conversation: token ids, which were sampled, their log-probs."""

    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def extend(self, ids: list[int], logprobs: list[float] | None = None) -> None:
        self.ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)


class Sampler:
    """Samples one turn for many prompts at once."""

    def __init__(self, model: Any, tokenizer: Any, config: Config, seed: int) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens = 0

    @torch.inference_mode()
    def turns(self, paths: list[Path_]) -> list[str]:
        """Append a sampled turn to every path; returns their texts."""
        pad, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        longest = max(len(p.ids) for p in paths)
        ids = torch.tensor([[pad] * (longest - len(p.ids)) + p.ids for p in paths])
        mask = torch.tensor([[0] * (longest - len(p.ids)) + [1] * len(p.ids) for p in paths])
        position = (mask.cumsum(1) - 1).clamp(min=0)
        cache, live = DynamicCache(), torch.arange(len(paths))
        new: list[list[int]] = [[] for _ in paths]
        logs: list[list[float]] = [[] for _ in paths]
        inputs = ids
        for _ in range(self.config.harness.max_tokens):
            out = self.model(input_ids=inputs, attention_mask=mask, position_ids=position, past_key_values=cache, logits_to_keep=1)
            logp = torch.log_softmax(out.logits[:, -1].float() / self.config.rollout.temperature, -1)
            drawn = torch.multinomial(logp.exp(), 1, generator=self.generator)
            for row, (token, value) in enumerate(zip(drawn[:, 0].tolist(), logp.gather(1, drawn)[:, 0].tolist(), strict=True)):
                new[live[row]].append(token)
                logs[live[row]].append(value)
            keep = drawn[:, 0] != end
            if not keep.any():
                break
            if not keep.all():
                cache.batch_select_indices(keep.nonzero()[:, 0])
                live, mask, position, drawn = live[keep], mask[keep], position[keep], drawn[keep]
            inputs = drawn
            mask = torch.cat([mask, torch.ones(len(live), 1, dtype=mask.dtype)], 1)
            position = position[:, -1:] + 1
        for path, tokens, values in zip(paths, new, logs, strict=True):
            path.extend(tokens, values)
            self.tokens += len(tokens)
        return [self.tokenizer.decode(t[:-1] if t[-1] == end else t) for t in new]


class Execution:
    """The bundled harness's behaviour for one task, as a state machine: `path` is the conversation that waits for a turn."""

    def __init__(self, chore: Chore, tokenizer: Any, config: Config, rng: random.Random) -> None:
        self.chore, self.tokenizer, self.config, self.rng = chore, tokenizer, config, rng
        self.shell = Shell(chore.initial)
        self.paths: list[Path_] = []
        self.turns = self.good_turns = 0
        self.stage, self.prompt = "main", chore.instruction
        lines = chore.instruction.split("\n")
        if len(lines) > 1 and rng.random() < config.harness.sub_agent:
            self.stage, self.rest = "sub", "\n".join(lines[:-1])
            self._start(texts.SUB_AGENT_SYSTEM, texts.sub_agent_prompt(lines[-1]))
        else:
            self._start(texts.SYSTEM, self.prompt)
        self.compact_after = rng.randint(1, 3) if rng.random() < config.harness.compaction else 0
        self.done = False

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _start(self, system: str, user: str) -> None:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        tools = transcripts.tools_for_template()
        text = self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        self.path = Path_()
        self.path.extend(self._encode(text))
        self.paths.append(self.path)
        self.calls = 0

    def _answer(self, text: str) -> None:
        closing = "\n" if self.path.ids[-1] == self.tokenizer.eos_token_id else "<|im_end|>\n"
        self.path.extend(self._encode(f"{closing}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"))

    def advance(self, text: str) -> None:
        """Take a turn that was sampled for `path`."""
        self.turns += 1
        if self.stage == "summary":
            self.good_turns += 1
            self.stage = "main"
            self._start(texts.SYSTEM, texts.compacted_prompt(self.prompt, text.strip()))
            return
        results = []
        for match in CALL.finditer(text):
            try:
                call = json.loads(match[1])
                results.append(self.shell.call(call["name"], call["arguments"]))
            except (ValueError, KeyError, TypeError):
                break
        self.good_turns += bool(results) or "<tool_call>" not in text
        if results and self.turns < self.config.harness.max_turns:
            self.calls += 1
            if self.stage == "main" and self.calls == self.compact_after:
                self.stage, self.compact_after = "summary", 0
                results[-1] += f"\n</tool_response><|im_end|>\n<|im_start|>user\n{texts.COMPACT}"
                body = "\n</tool_response><|im_end|>\n<|im_start|>user\n<tool_response>\n".join(results)
                self._answer(f"<tool_response>\n{body}")
            else:
                body = "\n</tool_response><|im_end|>\n<|im_start|>user\n<tool_response>\n".join(results)
                self._answer(f"<tool_response>\n{body}\n</tool_response>")
        elif self.stage == "sub":
            self.stage, self.prompt = "main", texts.delegated_prompt(self.rest, text.strip())
            self._start(texts.SYSTEM, self.prompt)
        else:
            self.done = True

    @property
    def score(self) -> float:
        return self.chore.score(self.shell.files)


def roll_out(sampler: Sampler, executions: list[Execution]) -> None:
    """Run all executions to their end, turn by turn."""
    while waiting := [e for e in executions if not e.done]:
        waiting.sort(key=lambda e: len(e.path.ids))
        for execution, text in zip(waiting, sampler.turns([e.path for e in waiting]), strict=True):
            execution.advance(text)


def train(model: Any, optimizer: Any, config: Config, groups: list[list[Execution]]) -> dict[str, float]:
    """One optimizer step on complete groups; the gradient is the mean over executions of the mean over targets."""
    t = config.training
    rule = Objective(config.rollout.temperature, t.token_cap, t.clip_low, t.clip_high)
    rows: list[tuple[Path_, float, float]] = []
    count = sum(map(len, groups))
    for group in groups:
        for execution, advantage in zip(group, group_advantages([e.score for e in group], [True] * len(group)), strict=True):
            targets = sum(sum(p.sampled) for p in execution.paths)
            if advantage:
                rows += [(path, 1.0 / targets, float(advantage)) for path in execution.paths if any(path.sampled)]
    rows.sort(key=lambda item: len(item[0].ids))
    optimizer.zero_grad(set_to_none=True)
    sums: dict[str, float] = {"clipped": 0.0, "targets": 0.0}
    for at in range(0, len(rows), 48):
        chunk = rows[at : at + 48]
        length = max(len(p.ids) for p, _, _ in chunk)
        ids = torch.tensor([p.ids + [0] * (length - len(p.ids)) for p, _, _ in chunk])
        sampled = torch.tensor([p.sampled + [False] * (length - len(p.ids)) for p, _, _ in chunk])
        behaviour = torch.tensor([p.logprobs + [0.0] * (length - len(p.ids)) for p, _, _ in chunk])
        row, place = torch.nonzero(sampled, as_tuple=True)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[row, place - 1]) / config.rollout.temperature
        logp = torch.log_softmax(logits, -1).gather(1, ids[row, place].unsqueeze(1))[:, 0]
        weight, gain = torch.tensor([w for _, w, _ in chunk]), torch.tensor([a for _, _, a in chunk])
        loss, parts = objective(logp, behaviour[row, place], row, weight, gain, rule)
        (loss / count).backward()
        sums["clipped"] += float(parts["clipped"])
        sums["targets"] += len(row)
    if t.clip_grad:
        sums["norm"] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), t.clip_grad))
    optimizer.step()
    return sums


def learn(config: Config, directory: Path, seed: int, stale: int) -> list[float]:
    """One run; returns the sampled mean score of every step's batch."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    t, s = config.training, config.schedule
    optimizer = torch.optim.AdamW(model.parameters(), lr=t.lr, betas=t.betas, weight_decay=t.weight_decay)
    rng = random.Random(f"{seed} run")
    versions = [copy.deepcopy(model.state_dict())]
    actor = copy.deepcopy(model)
    sampler = Sampler(actor, tokenizer, config, seed)
    scores: list[float] = []
    for step in range(config.run.steps):
        actor.load_state_dict(versions[0] if len(versions) <= stale else versions[-1 - stale])
        began = time.process_time()
        groups = []
        for group in range(s.groups_per_step):
            chore = draw(config.tasks.seed + seed, step * s.groups_per_step + group, rng.choice(config.tasks.difficulty))
            groups.append([Execution(chore, tokenizer, config, rng) for _ in range(s.group_size)])
        everyone = [e for group in groups for e in group]
        tokens = sampler.tokens
        roll_out(sampler, everyone)
        rolled = time.process_time()
        rate = t.lr * min(1.0, (step + 1) / t.warmup_steps) if t.warmup_steps else t.lr
        for parameters in optimizer.param_groups:
            parameters["lr"] = rate
        sums = train(model, optimizer, config, groups)
        versions = [*versions[-3:], copy.deepcopy(model.state_dict())]
        scores.append(float(np.mean([e.score for e in everyone])))
        good = sum(e.good_turns for e in everyone) / sum(e.turns for e in everyone)
        turns = sum(e.turns for e in everyone) / len(everyone)
        print(
            f"step {step + 1:3d} score {scores[-1]:.3f} well-formed {good:.3f} turns {turns:.2f} tokens {sampler.tokens - tokens}"
            f" clipped {sums['clipped'] / max(sums['targets'], 1):.2f} norm {sums.get('norm', 0):.2f}"
            f" cpu {rolled - began:.2f}+{time.process_time() - rolled:.2f} s",
            flush=True,
        )
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("--seeds", type=lambda s: [int(x) for x in s.split(",")], default=[0, 1, 2], metavar="0,1,2")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--stale", type=int, default=1)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    config = load(arguments.config, arguments.overrides)
    torch.set_num_threads(1)
    directory = arguments.model or (recipe.ensure(print) if config.model.path == BUILTIN_MODEL else Path(config.model.path))
    for seed in arguments.seeds:
        scores = learn(config, directory, seed, arguments.stale)
        print(f"seed {seed}: first 3 {np.mean(scores[:3]):.3f}, last 5 {np.mean(scores[-5:]):.3f}", flush=True)


if __name__ == "__main__":
    main()
