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


def family_model(directory: Path, family: Family) -> Path:
    """A directory with a byte-level tokenizer, the family's control tokens and its template; no weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.control])
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
