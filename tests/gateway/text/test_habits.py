"""What each family's template turns out to take."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.errors import ConfigError
from gyre_hpc.gateway.text.chat import KIMI_IDS, SHORT_IDS, Habits
from gyre_hpc.gateway.text.template import TurnRenderer
from tests.gateway.families import COMMAND, GEMMA, GEMMA4, GLM, HARMONY, KIMI, LLAMA, NEMO, QWEN_THINKING, Family, family_model


def found(folder: Path, family: Family) -> Habits:
    return TurnRenderer(family_model(folder, family))._writer.habits


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        (QWEN_THINKING, Habits()),
        (LLAMA, Habits(single_calls=True, bare_calls=True)),
        (GLM, Habits(system_inside=False)),
        (HARMONY, Habits(system_inside=False, single_calls=True, thoughts="thinking", one_place=True, looks_back=1)),
        (COMMAND, Habits(looks_back=2)),
        (GEMMA, Habits(system=False, system_inside=False, tools=False, calls=False, alternates=True)),
        (GEMMA4, Habits(bare_calls=True, looks_back=1)),
        (KIMI, Habits(ids=KIMI_IDS, looks_back=2)),
        (NEMO, Habits(system_inside=False, alternates=True, ids=SHORT_IDS, bare_calls=True)),
    ],
    ids=["qwen", "llama", "glm", "gpt-oss", "command", "gemma", "gemma 4", "kimi", "nemo"],
)
def test_the_habits_of_families(tmp_path: Path, family: Family, wanted: Habits) -> None:
    assert found(tmp_path, family) == wanted


def test_a_template_that_wants_parts(tmp_path: Path) -> None:
    """As those of models that see: content is a list of parts, and a plain text would be left out letter by letter."""
    listed = LLAMA.template.replace("message.content | trim", "message.content[0].text | trim").replace(
        "messages[0].content | trim", "messages[0].content[0].text | trim"
    )
    assert found(tmp_path, Family(LLAMA.control, LLAMA.stops, listed)).parts


def test_a_history_that_changes_when_it_is_long_is_written_in_parts_if_it_can_be(tmp_path: Path) -> None:
    """Also where a turn has one call: probes with several are split. gpt-oss's results need the call before them."""

    def changing(family: Family, loop: str) -> Family:
        long = family.template.replace(loop, loop + "{%- if messages | length > 8 -%}{{- 'long' -}}{%- endif -%}")
        assert long != family.template
        return Family(family.control, family.stops, long)

    assert found(tmp_path / "parts", changing(LLAMA, "{%- for message in messages -%}")).in_parts
    with pytest.raises(ConfigError, match="can't be used"):
        found(tmp_path / "none", changing(HARMONY, "{%- for message in rest -%}"))
