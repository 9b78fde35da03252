"""Chat templates of the kinds that models have, in the special tokens of the bundled tokenizer."""

from __future__ import annotations

import copy
from typing import Any

from fakes import bundled_tokenizer

_CHATML = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_TRIMMED = _CHATML.replace("{{ m['content'] }}", "{{ m['content'] | trim }}")

# Turns end with the end token and nothing else; a system message is put into the first user's.
_INSTRUCT = """{% set s = namespace(text='') %}{% for m in messages %}{% if m['role'] == 'system' %}\
{% set s.text = m['content'] ~ '\\n' %}{% elif m['role'] == 'assistant' %}{{ m['content'] }}<|im_end|>\
{% else %}[INST] {{ s.text }}{{ m['content'] }} [/INST]{% set s.text = '' %}{% endif %}{% endfor %}"""

_TOOLS = """{% if tools %}<|im_start|>system
Tools: {% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}{% if m.tool_calls %}{% for c in m.tool_calls %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Reasoning is shown only after the last question of the user: earlier turns lose it.
_STRIPPED = """{% set last = namespace(index=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}\
{% set last.index = loop.index0 %}{% endif %}{% endfor %}{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['role'] == 'assistant' and m.reasoning_content and loop.index0 > last.index %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m['content'] }}{% if m.tool_calls %}{% for c in m.tool_calls %}
<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Reasoning is kept in all turns.
_KEPT = _STRIPPED.replace(" and loop.index0 > last.index", "")

# The template itself opens the reasoning.
_OPENED = _KEPT.replace(
    "{% if add_generation_prompt %}<|im_start|>assistant\n",
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n",
)

TEMPLATES: dict[str, str] = {
    "chatml": _CHATML,
    "trimmed": _TRIMMED,
    "instruct": _INSTRUCT,
    "tools": _TOOLS,
    "thinking stripped": _STRIPPED,
    "thinking kept": _KEPT,
    "thinking opened": _OPENED,
}


def tokenizer_with(template: str) -> Any:
    """The bundled tokenizer with another template."""
    tokenizer = copy.deepcopy(bundled_tokenizer())
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer
