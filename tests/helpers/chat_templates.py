"""Chat templates in the styles of real models, and small tokenizers that use them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from emo.data_prep.encoding.tokenizer import load_tokenizer, save_tokenizer
from tests.helpers.corpus import lasting_directory, tiny_tokenizer

SAYS = "{{ m.content }}<|im_end|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n" + SAYS + "\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (  # [INST] is not a special token, EOS ends an answer, and other roles raise
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content|trim + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
MISTRAL = (  # the system message and the tools are only written in front of the user's last message
    "{% set users = messages | selectattr('role', 'eq', 'user') | list %}{{ bos_token }}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | map(attribute='function') | list | tojson }}"
    "{{ eos_token }}{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
LEARNED = "{% if m.role == 'assistant' %}{% generation %}" + SAYS + "{% endgeneration %}"
MARKED = CHATML.replace(SAYS, LEARNED + "{% else %}" + SAYS + "{% endif %}")  # marks the assistant's text
THOUGHTS = "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
THINKING = CHATML.replace(SAYS, THOUGHTS + SAYS)  # like Qwen3: only the last answer has thoughts
SILENT = CHATML.replace("<|im_end|>", "").replace("<|im_start|>", "")  # no token ends an answer
TODAY = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}1 Jan 2024{% endif %}"
DATED = TODAY + CHATML
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}{% endfor %}"
CALLING = CHATML.replace(SAYS, "{{ m.content or '' }}" + CALLS + "<|im_end|>")
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}" + CALLING


@cache
def tokenizer_with(template: str) -> Path:
    """Save a tokenizer with ChatML's tokens and a template like `prepare`. The original is in the parent."""
    original = lasting_directory()
    tokenizer = load_tokenizer(tiny_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    if "im_end" in template:
        tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template
    tokenizer.save_pretrained(original)
    save_tokenizer(original, None, original / "saved")
    return original / "saved"
