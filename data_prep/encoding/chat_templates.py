"""Chat templates of tokenizers, and rendering of messages with them.

A template gets the messages of the row with special tokens in them protected: these are text and never end a
turn. The result does not depend on the current date.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from emo.common.errors import UserError, one_line

Message = dict[str, Any]  # a message as a chat template gets it

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
DATE = "2026-01-01"  # the current date for templates, unless data.template_variables has `date`
# Variables of templates that data.template_variables cannot set.
GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "chat_template")
# strftime codes that templates use.
CODES = ["%Y", "%m", "%d", "%B", "%b", "%A", "%a", "%y", "%j", "%H", "%M", "%S", "%-d", "%-m", "%e"]
# Tokens around reasoning, in the same order: of most models, Seed, Magistral, Command A and Gemma 4.
OPENING = ("<think>", "<thinking>", "<seed:think>", "[THINK]", "<|START_THINKING|>", "<|channel>")
CLOSING = ("</think>", "</thinking>", "</seed:think>", "[/THINK]", "<|END_THINKING|>", "<channel|>")
TAGS = "think|thinking|seed:think"  # names of those that are tags
THINK = rf"<(/?)(?:{TAGS})>|\[(/?)THINK\]"
# An empty thinking block at the beginning of an answer. The prompt may hold its first tag.
EMPTY_THINKING = re.compile(
    rf"\s*(?:<(?:{TAGS})>|\[THINK\]|<\|channel>thought|<\|START_THINKING\|>)?"
    rf"\s*(?:</(?:{TAGS})>|\[/THINK\]|<channel\|>|<\|END_THINKING\|>)\s*"
)
# Thinking at the beginning of a content.
THOUGHT = re.compile(rf"\s*<({TAGS})>(.*?)</\1>\s*", re.S)
REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of a message
PREFACES = ("system", "developer")  # roles of the message before all others
BUILT_IN = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
        "+ '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] "
        "+ '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
}


class ChatTemplate(NamedTuple):
    """A chat_template, the special tokens that it may write, and its settings in the recipe."""

    text: str
    names: tuple[tuple[str, str], ...]  # bos_token, eos_token ... and their values
    specials: tuple[str, ...]  # special tokens that only the template may write. In messages they are text
    variables: str = "{}"  # JSON: data.template_variables
    reasoning: str = "mask_empty"  # data.reasoning
    reasoning_weight: float = 1.0  # data.reasoning_weight

    @property
    def digest(self) -> str:
        """Return a hash of the content, 64 hex digits."""
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()

    def last(self, text: str) -> str:
        """Return the special token that ends a text, or ''."""
        if not text.endswith(self.specials):  # fast for most texts
            return ""
        return next(special for special in self.specials if text.endswith(special))

    def first(self, text: str, start: int = 0) -> str:
        """Return the special token that a text has at `start`, or ''."""
        return next((special for special in self.specials if text.startswith(special, start)), "")


class RefusedError(Exception):
    """A template cannot write a chat, or the assistant's part of the chat cannot be found."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def read_template(
    directory: Path,
    name: str,
    built_in: str = "chat_template",
    variables: Mapping[str, object] | None = None,
    reasoning: str = "mask_empty",
    reasoning_weight: float = 1.0,
) -> ChatTemplate:
    """Return the chat_template for a saved tokenizer. Raises UserError.

    Args:
        directory: The saved tokenizer.
        name: The tokenizer as the recipe names it, for errors.
        built_in: data.template, a built-in template, or chat_template for the template of the tokenizer.
        variables: data.template_variables.
        reasoning: data.reasoning.
        reasoning_weight: data.reasoning_weight.
    """
    from .tokenizer import chat_template
    from .words import special_tokens

    known = special_tokens(directory)
    if built_in in BUILT_IN:
        text, needed = BUILT_IN[built_in]
        missing = [token for token in needed if token not in known]
        if missing:
            raise UserError(
                f"data.template={built_in} needs the special tokens {', '.join(needed)}, and {name} lacks "
                f"{', '.join(missing)}. Use a tokenizer with them, or set data.template to chat",
                code="template-tokens",
            )
    else:
        template = chat_template(directory)
        if template is None:
            raise UserError(
                f"tokenizer {name} has no chat_template, which data.template=chat_template needs. Use "
                "another tokenizer, put a chat_template.jinja into its directory, or set data.template to "
                f"{', '.join(BUILT_IN)}, chat or alpaca",
                code="no-chat-template",
            )
        text = template
    unread = [variable for variable in variables or {} if variable not in text]
    if unread and not (unread == ["date"] and "strftime_now" in text):
        raise UserError(
            f"data.template_variables: the chat template of {name} reads no variable {unread[0]}. Correct "
            "the name or remove it",
            code="template-variable",
        )
    written = json.dumps(variables or {}, sort_keys=True, default=str)  # YAML reads a date as one
    return with_tokens(text, directory)._replace(
        variables=written, reasoning=reasoning, reasoning_weight=reasoning_weight
    )


def with_tokens(text: str, directory: Path) -> ChatTemplate:
    """Return a chat_template for the special tokens of a saved tokenizer."""
    from .tokenizer import special_names
    from .words import special_tokens

    specials = tuple(sorted(special_tokens(directory), key=len, reverse=True))  # the longest match is used
    return ChatTemplate(text, tuple(sorted(special_names(directory).items())), specials)


def fixed_date(variables: Mapping[str, object]) -> datetime.date:
    """Return the date for templates from data.template_variables."""
    return datetime.date.fromisoformat(str(variables.get("date", DATE)))


class Renderer:
    """Renders messages with a chat_template."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.marked = bool(MARKED.search(template.text))
        self._variables: dict[str, object] = {**dict(template.names), **json.loads(template.variables)}
        self._text = template.text
        if "strftime_now" in template.text:
            day = fixed_date(self._variables)
            steps = "".join(f"|replace({code!r}, {day.strftime(code)!r})" for code in CODES)
            self._text = (
                "{%- macro strftime_now(form) -%}{{ form" + steps + " }}{%- endmacro -%}" + template.text
            )

    @cached_property
    def patterns(self) -> dict[bool, tuple[re.Pattern[str], re.Pattern[str]]]:
        """Return patterns of the special tokens in a text, and of protected special tokens.

        The key True is for the assistant, whose thinking tags are not protected.
        """
        from transformers.utils.chat_template_utils import _get_control_token_patterns

        specials = self.template.specials
        others = tuple(special for special in specials if not re.fullmatch(THINK, special))
        return {False: _get_control_token_patterns(specials), True: _get_control_token_patterns(others)}

    @cached_property
    def _writes_developers(self) -> bool:
        """Return whether the template writes messages of the role developer."""
        if "developer" not in self.template.text:
            return False
        try:
            probe = [{"role": role, "content": "Hello"} for role in ("user", "assistant")]
            return "Preface" in self.write([{"role": "developer", "content": "Preface"}, *probe], None)[0]
        except RefusedError:
            return False

    def protect(self, messages: list[Message], tools: Any) -> tuple[list[Message], Any]:
        """Return messages and tools in which special tokens are marked as text."""
        from transformers.utils.chat_template_utils import mark_control_tokens

        protected = []
        for message in messages:
            pattern, _ = self.patterns[message["role"] == "assistant"]
            protected.append(mark_control_tokens(message, pattern))
            if message["role"] == "developer" and not self._writes_developers:
                protected[-1]["role"] = "system"  # the only name in older templates
        return protected, mark_control_tokens(tools, self.patterns[False][0])

    def write(
        self, messages: Sequence[Message], tools: Any, prompt: bool = False, spans: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of the template and, with `spans`, the spans that it marks. Raises RefusedError.

        Args:
            messages: Protected messages.
            tools: Protected schemas of tools.
            prompt: Whether the text asks for an answer at its end.
            spans: Whether to return the marked spans.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self._text,
                return_assistant_tokens_mask=spans,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except Exception as error:  # templates raise any class
            raise RefusedError("refused_by_chat_template", one_line(error, 200)) from None
        (written,), marks = rendered
        return written, marks[0] if spans else []
