"""Small chat templates after the manner of model families, and tokenizers with their control tokens. Not the families' own files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


@dataclass(frozen=True)
class Family:
    """`control`: special tokens; `stops`: those that end a turn, the first is the eos token; `template`: Jinja."""

    control: tuple[str, ...]
    stops: tuple[str, ...]
    template: str


LLAMA = Family(
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    ("<|eot_id|>", "<|eom_id|>"),
    """{{- bos_token -}}
{%- macro header(role) -%}{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' -}}{%- endmacro -%}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' -%}
{{- header('system') + 'Cutting Knowledge Date: December 2023\\n\\n' + system + '<|eot_id|>' -}}
{%- for message in messages -%}
{%- if message.role == 'system' and loop.first -%}
{%- elif message.tool_calls -%}
{{- header('assistant') -}}
{%- if message.tool_calls | length != 1 -%}{{- raise_exception('only single tool-calls at once') -}}{%- endif -%}
{{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' + message.tool_calls[0].function.arguments | tojson + '}' -}}
{{- '<|eot_id|>' -}}
{%- elif message.role == 'tool' -%}{{- header('ipython') + message.content | tojson + '<|eot_id|>' -}}
{%- else -%}{{- header(message.role) + message.content | trim + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- header('assistant') -}}{%- endif -%}""",
)
QWEN_THINKING = Family(
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    ("<|im_end|>", "<|endoftext|>"),
    # as Qwen3: thoughts of turns before the last question are dropped
    """{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if message.reasoning_content and loop.index0 > ns.last -%}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
{%- elif loop.last -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}""",
)
GLM = Family(
    ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ("<|endoftext|>", "<|user|>", "<|observation|>"),
    # as GLM-4.5: a turn has no end of its own, the next role's token is where it ends
    """{{- '[gMASK]<sop>' -}}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- '<|user|>\\n' + message.content -}}
{%- elif message.role == 'assistant' -%}{{- '<|assistant|>\\n<think>' -}}
{%- if message.reasoning_content -%}{{- message.reasoning_content -}}{%- endif -%}{{- '</think>\\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>' + call.function.name + '\\n' + call.function.arguments | tojson + '</tool_call>' -}}
{%- endfor -%}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|observation|>' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- else -%}{{- '<|system|>\\n' + message.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}""",
)
DEEPSEEK = Family(
    (
        "<\uff5cbegin\uff5c>",
        "<\uff5cend\uff5c>",
        "<\uff5cUser\uff5c>",
        "<\uff5cAssistant\uff5c>",
        "<\uff5coutput\uff5c>",
        "<\uff5c/output\uff5c>",
    ),
    ("<\uff5cend\uff5c>",),
    """{{- bos_token -}}{%- for message in messages -%}{%- if message.role == 'system' -%}{{- message.content -}}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- '<\uff5cUser\uff5c>' + message.content -}}
{%- elif message.role == 'assistant' -%}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role == 'user' -%}{{- '<\uff5cAssistant\uff5c>' -}}{%- endif -%}
{{- message.content.split('</think>')[-1] -}}
{%- for call in message.tool_calls or [] -%}{{- '\\ncall ' + call.function.name + call.function.arguments | tojson -}}{%- endfor -%}
{{- '<\uff5cend\uff5c>' -}}
{%- elif message.role == 'tool' -%}{{- '<\uff5coutput\uff5c>' + message.content + '<\uff5c/output\uff5c>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role == 'user' -%}{{- '<\uff5cAssistant\uff5c>' -}}{%- endif -%}""",
)
MISTRAL = Family(
    ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ("</s>",),
    # as Mistral's v3: the tools stand before the last question, wherever that is
    """{{- bos_token -}}
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{%- if tools and loop.index0 == ns.last -%}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
{{- '[INST] ' + message.content + '[/INST]' -}}
{%- elif message.role == 'assistant' -%}{{- ' ' + message.content + '</s>' -}}
{%- elif message.role == 'tool' -%}{{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' -}}
{%- endif -%}
{%- endfor -%}""",
)


HARMONY = Family(
    ("<|startoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
    ("<|return|>", "<|call|>"),
    # as gpt-oss: an answer ends otherwise in a history than it is drawn, results have the name of the last call, one call in a turn
    """{%- if messages[0].role == 'system' -%}{%- set said = messages[0].content -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set said = '' -%}{%- set rest = messages -%}{%- endif -%}
{{- '<|start|>developer<|message|>' + said + (tools | tojson if tools else '') + '<|end|>' -}}
{%- set last = namespace(name=none) -%}
{%- for message in rest -%}
{%- if message.role == 'assistant' and message.tool_calls -%}
{%- if message.thinking and message.content -%}{{- raise_exception('one of both') -}}{%- endif -%}
{%- if message.thinking or message.content -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.thinking or message.content) + '<|end|>' -}}
{%- endif -%}
{%- set last.name = message.tool_calls[0].function.name -%}
{{- '<|start|>assistant to=functions.' + last.name + '<|channel|>commentary json<|message|>' -}}
{{- message.tool_calls[0].function.arguments | tojson + '<|call|>' -}}
{%- elif message.role == 'assistant' -%}
{%- set last.name = none -%}
{%- set end = '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + end -}}
{%- elif message.role == 'tool' -%}
{%- if last.name is none -%}{{- raise_exception('no call before this') -}}{%- endif -%}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' -}}
{%- elif message.role == 'user' -%}{{- '<|start|>user<|message|>' + message.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}""",
)
COMMAND = Family(
    (
        "<bos>",
        "<|turn|>",
        "<|end_turn|>",
        "<|user|>",
        "<|system|>",
        "<|bot|>",
        "<|response|>",
        "<|/response|>",
        "<|action|>",
        "<|/action|>",
    ),
    ("<|end_turn|>",),
    # as Command R7B: calls are counted over the conversation, and results have their numbers
    """{{- bos_token -}}
{%- set count = namespace(calls=0) -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{- '<|turn|><|system|>' + message.content + '<|end_turn|>' -}}
{%- elif message.role == 'user' -%}{{- '<|turn|><|user|>' + message.content + '<|end_turn|>' -}}
{%- elif message.role == 'assistant' and message.tool_calls -%}
{{- '<|turn|><|bot|>' -}}{%- if message.content -%}{{- message.content -}}{%- endif -%}{{- '<|action|>[' -}}
{%- for call in message.tool_calls -%}
{{- '{"id": "' + count.calls | string + '", "tool": "' + call.function.name + '", "of": ' + call.function.arguments | tojson + '}' -}}
{%- set count.calls = count.calls + 1 -%}
{%- endfor -%}
{{- ']<|/action|><|end_turn|>' -}}
{%- elif message.role == 'assistant' -%}{{- '<|turn|><|bot|><|response|>' + message.content + '<|/response|><|end_turn|>' -}}
{%- elif message.role == 'tool' -%}
{{- '<|turn|><|system|>' -}}
{%- set seen = namespace(calls=0) -%}
{%- for other in messages -%}{%- for call in other.tool_calls or [] -%}
{%- if call.id == message.tool_call_id -%}{{- '{"id": "' + seen.calls | string + '"}' -}}{%- endif -%}
{%- set seen.calls = seen.calls + 1 -%}
{%- endfor -%}{%- endfor -%}
{{- message.content + '<|end_turn|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn|><|bot|>' -}}{%- endif -%}""",
)
GEMMA = Family(
    ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    ("<end_of_turn>",),
    # as Gemma 2: two roles that alternate, nothing else
    """{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{- raise_exception('no system role') -}}{%- endif -%}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' + message.content | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}""",
)
GEMMA4 = Family(
    ("<bos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    ("<turn|>", "<|tool_response>"),
    # as Gemma 4: what a tool shows stands inside the turn that called it, in front of the turn's text, and the next answer goes on there
    """{{- bos_token -}}
{%- set ns = namespace(open=false) -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- if not ns.open -%}{{- '<|turn>model\\n' -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '<|tool_call>' + call.function.name + call.function.arguments | tojson + '<tool_call|>' -}}
{%- endfor -%}
{%- set ns.open = false -%}
{%- if message.tool_calls -%}
{%- for other in messages[loop.index:] -%}
{%- if other.role != 'tool' -%}{%- break -%}{%- endif -%}
{{- '<|tool_response>' + (message.tool_calls | selectattr('id', 'equalto', other.tool_call_id) | first).function.name -}}
{{- other.content + '<tool_response|>' -}}
{%- set ns.open = true -%}
{%- endfor -%}
{%- endif -%}
{{- message.content | trim -}}
{%- set next = messages[loop.index:] | rejectattr('role', 'equalto', 'tool') | list -%}
{%- if next and next[0].role == 'assistant' -%}{%- set ns.open = true -%}
{%- elif next or not ns.open -%}{{- '<turn|>\\n' -}}{%- set ns.open = false -%}{%- endif -%}
{%- elif message.role != 'tool' -%}{{- '<|turn>' + message.role + '\\n' + message.content | trim + '<turn|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.open -%}{{- '<|turn>model\\n' -}}{%- endif -%}""",
)
KIMI = Family(
    (
        *("[BOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>"),
        *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    ("<|im_end|>",),
    # as Kimi K2: the id of a call is what the policy calls it
    """{%- for message in messages -%}
{{- '<|im_' + ('system' if message.role == 'tool' else message.role) + '|>' + message.role + '<|im_middle|>' -}}
{%- if message.role == 'tool' -%}{{- '## Return of ' + message.tool_call_id + '\\n' -}}{%- endif -%}
{{- message.content -}}
{%- if message.tool_calls -%}
{{- '<|tool_calls_section_begin|>' -}}
{%- for call in message.tool_calls -%}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + call.function.arguments | tojson + '<|tool_call_end|>' -}}
{%- endfor -%}
{{- '<|tool_calls_section_end|>' -}}
{%- endif -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}{%- endif -%}""",
)
NEMO = Family(
    ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ("</s>",),
    # as Mistral's v3 with the tools where the first question is: roles alternate, ids of calls have nine letters and digits
    """{{- bos_token -}}
{%- set ns = namespace(index=0, first=true) -%}
{%- if messages[0].role == 'system' -%}{%- set said = messages[0].content + '\\n\\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set said = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for message in rest -%}
{%- if message.role != 'tool' and not message.tool_calls -%}
{%- if (message.role == 'user') != (ns.index % 2 == 0) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
{%- set ns.index = ns.index + 1 -%}
{%- endif -%}
{%- if message.role == 'user' -%}
{{- '[INST]' + (said + (tools | tojson if tools else '') if ns.first else '') + message.content + '[/INST]' -}}{%- set ns.first = false -%}
{%- elif message.tool_calls -%}
{{- '[TOOL_CALLS][' -}}
{%- for call in message.tool_calls -%}
{%- if call.id | length != 9 -%}{{- raise_exception('ids must have nine letters') -}}{%- endif -%}
{{- (', ' if not loop.first else '') + (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' -}}
{%- endfor -%}
{{- ']</s>' -}}
{%- elif message.role == 'assistant' -%}{{- message.content + '</s>' -}}
{%- elif message.role == 'tool' -%}
{%- if message.tool_call_id | length != 9 -%}{{- raise_exception('ids must have nine letters') -}}{%- endif -%}
{{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' -}}
{%- else -%}{{- raise_exception('no such role') -}}
{%- endif -%}
{%- endfor -%}""",
)


ALL = (LLAMA, QWEN_THINKING, GLM, DEEPSEEK, MISTRAL, HARMONY, COMMAND, GEMMA, GEMMA4, KIMI, NEMO)


CONTROL = tuple(token for family in ALL for token in family.control)


def family_model(directory: Path, family: Family) -> Path:
    """A directory with a byte-level tokenizer, the control tokens of all families (one tokenizer is proven once) and the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in dict.fromkeys(CONTROL)])
    tokenizer.add_tokens(
        [AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(family.template)
    (directory / "config.json").write_text("{}")
    stops = [tokenizer.token_to_id(token) for token in family.stops]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    named = {"bos_token": family.control[0], "eos_token": family.stops[0], "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return directory
