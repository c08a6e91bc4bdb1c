"""Chats written by a chat_template -> training examples: text, and which parts of it carry loss.

A prompt is the text that the template writes for the messages before an answer when it asks for one. The
answer is the text after that, up to the token that ends the turn. An example is a prompt and its answer.
Answers of one chat share an example if each prompt and answer is the beginning of the next. Templates that
rewrite the history, for instance by dropping earlier reasoning, need one example for each answer.

Rendering every prompt costs the square of the number of turns. So the chat is rendered once with signs around
every field. The text between the signs shows where prompts and answers end. The first time that a text
between signs is seen, the prompt is rendered to learn the positions in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from .chat_templates import EMPTY_THINKING, PREFACES, REASONING, ChatTemplate, Message, RefusedError, Renderer
from .message_forms import (
    CALL_FORMS,
    CALL_PROBE,
    OPEN_TAG,
    PROBE,
    as_parts,
    as_text,
    assistant_indices,
    calls_as_text,
    close_thinking,
    reasoning_of,
    remove_reasoning,
)
from .signs import INSIDE, TAGS, SignedChat, SignedText
from .templates import Chat
from .weights import AnswerWeights

CACHE_SIZE = 4096  # texts between signs that are remembered
WRITERS = 64  # variables of single chats whose writers are remembered
THOUGHTS = (*REASONING, INSIDE)
# Fields that a template must write. Other fields, such as name, are only counted.
REQUIRED = (
    *THOUGHTS,
    "content",
    "system",
    "tool results",
    "tools",
    "tool_calls.name",
    "tool_calls.arguments",
)
# Tags around reasoning. Their names are not the reasoning, even if it is the same text.
MARKUP = r"<\|channel\|?>\w+|<[^<>\s]+>|\[/?[A-Z]+\]"
CHANGED_REASONING = (
    "data.reasoning_weight: the chat_template does not write this reasoning unchanged. "
    "Set data.reasoning_weight=1, or data.reasoning=drop"
)
Span = tuple[int, int]  # start and stop, in characters


class AnswerSpan(NamedTuple):
    """An answer in the text of an example."""

    number: int  # among the assistant's messages
    start: int  # characters
    stop: int
    masked: int  # characters from `start` on without loss: an empty thinking block
    weights: Sequence[float] | None = None  # of each character, and of the token after them; None: 1


class ChatExample(NamedTuple):
    """A text to train on."""

    text: str
    answers: tuple[AnswerSpan, ...]  # the supervised ones


class Edit(NamedTuple):
    """How a text differs from the text that the template writes for the same messages."""

    kept: int = 0  # characters of the prompt that the template drops as soon as the answer follows
    inserted: int = 0  # characters before the answer that the template does not write there

    def move(self, span: Span) -> Span:
        """Return the position in the text of a span that the template marks."""
        return span[0] + self.kept, span[1] + self.kept + self.inserted


UNEDITED = Edit()


class WrittenAnswer(NamedTuple):
    """An answer and all text before it."""

    text: str  # ends with the answer
    start: int
    end: str  # special token that ends the answer, if the template only writes it before the next message
    edit: Edit


class ChatWriter:
    """Writes chats as examples by one template, and remembers what it learned about the template."""

    def __init__(self, template: ChatTemplate, chat_variables: str = "") -> None:
        """Write chats with the variables `chat_variables`. Chats with other variables get another writer."""
        self.template = template
        self._chat_variables = chat_variables
        self.renderer = Renderer(template)
        self._last_read: tuple[Chat, list[Message], Any] | None = (
            None  # the last chat, its messages and tools
        )
        self._last_seen: tuple[SignedChat, set[int]] | None = (
            None  # its signs in the text, if it is one example
        )
        self._last_form: Any = None  # one of CALL_FORMS, in which the template wrote the last chat
        self._offsets: dict[Any, Span | None] = {}
        self._writers: dict[str, ChatWriter] = {}  # for the variables of single chats

    def _writer_for(self, chat: Chat) -> ChatWriter:
        """Return the writer for the template's variables in a chat."""
        if chat.variables == self._chat_variables:
            return self
        if chat.variables not in self._writers:
            if len(self._writers) >= WRITERS:
                self._writers.clear()
            variables = json.dumps(json.loads(self.template.variables) | json.loads(chat.variables))
            template = self.template._replace(variables=variables)
            self._writers[chat.variables] = ChatWriter(template, chat.variables)
        return self._writers[chat.variables]

    def examples(self, chat: Chat, exact: bool = False) -> list[ChatExample]:
        """Return the examples of a chat. With `exact` every prompt is rendered. Raises RefusedError."""
        if (writer := self._writer_for(chat)) is not self:
            return writer.examples(chat, exact)
        examples = self._try_forms(chat, lambda messages, tools: self._examples(chat, messages, tools, exact))
        if not chat.weights and self.template.reasoning_weight == 1:
            return examples
        return [self._weighted(chat, example, examples) for example in examples]

    def prompt(self, messages: list[Message]) -> str:
        """Return messages as text, up to the beginning of an answer. Raises RefusedError."""
        messages = [as_parts(message) for message in messages] if self._takes_parts else messages
        protected, _ = self.renderer.protect(messages, None)
        return self.renderer.write(protected, None, prompt=True)[0]

    def left_out(self, chat: Chat, examples: list[ChatExample]) -> list[str]:
        """Return the fields of a chat that are not completely in its examples."""
        if (writer := self._writer_for(chat)) is not self:
            return writer.left_out(chat, examples)
        return self._try_forms(chat, lambda messages, tools: self._left_out(messages, tools, examples))

    # --- what the template gets ---------------------------------------------------------------------------

    def _try_forms(self, chat: Chat, function: Callable[[list[Message], Any], Any]) -> Any:
        """Return the result of a function of messages and tools for the first form of calls it accepts."""
        if self._last_read is None or self._last_read[0] is not chat:  # each chat is read twice
            self._last_read = (chat, *self._read(chat))
            self._last_seen = None
            self._last_form = None
        _, messages, tools = self._last_read
        has_calls = any(message.get("tool_calls") for message in messages)
        forms = self._call_forms if has_calls else CALL_FORMS[:1]
        refused = None
        # The form depends only on the template and on the chat, never on the rows before it.
        for form in forms if self._last_form is None else [self._last_form]:
            try:
                result = function(form(messages), tools)
                self._last_form = form
                return result
            except RefusedError as error:
                # The template's own error about one form is less useful than why another form fails.
                if refused is None or refused.reason == "refused_by_chat_template":
                    refused = error
        assert refused is not None
        raise refused

    def _read(self, chat: Chat) -> tuple[list[Message], Any]:
        """Return the messages and tools of a chat as the template gets them."""
        messages = json.loads(chat.messages)
        indices = assistant_indices(messages)
        supervised = [index for number, index in enumerate(indices) if number not in chat.unsupervised]
        messages = messages[: supervised[-1] + 1]  # later messages have no loss
        for message in messages if self.template.reasoning != "keep" else ():
            if message["role"] == "assistant":
                remove_reasoning(message, only_empty=self.template.reasoning != "drop")
        if self._takes_parts:
            messages = [as_parts(message) for message in messages]
        return self.renderer.protect(messages, json.loads(chat.tools) if chat.tools else None)

    @cached_property
    def _call_forms(self) -> list[Any]:
        """Return the forms that tool calls may have, first the one in which the template writes a plain call.

        Arguments as JSON text are accepted only if the template writes them unchanged: a template that
        encodes them would encode them twice.
        """
        for form in CALL_FORMS:
            try:
                text, _ = self.renderer.write(form([PROBE[0], CALL_PROBE]), None)
            except RefusedError:
                continue
            if "World" not in text or '\\"World' in text:
                continue
            if form is calls_as_text:
                return [form]
            return [form, *(other for other in CALL_FORMS if other is not form)]
        return [CALL_FORMS[0]]

    @cached_property
    def _takes_parts(self) -> bool:
        """Return whether the template takes content only as a list of parts, like those of vision models."""
        written = []
        for messages in (PROBE, [as_parts(message) for message in PROBE]):
            try:
                written.append(self.renderer.write(messages, None)[0])
            except RefusedError:
                written.append("")
        return "World" not in written[0] and "World" in written[1] and "'text'" not in written[1]

    # --- examples -----------------------------------------------------------------------------------------

    def _examples(self, chat: Chat, messages: list[Message], tools: Any, exact: bool) -> list[ChatExample]:
        self._last_seen = None
        indices = assistant_indices(messages)
        last = self._write_answer(messages, tools, indices[-1])
        supervised = [number for number in range(len(indices)) if number not in chat.unsupervised]
        if not exact and len(indices) > 1:
            spans = self._locate(messages, tools, indices, last)
            if spans is not None:
                return [self._example(last, {i: spans[i] for i in supervised}, messages, tools)]
        written = {i: self._write_answer(messages, tools, indices[i]) for i in supervised[:-1]}
        written[supervised[-1]] = last
        examples: list[ChatExample] = []
        left = set(supervised)
        for number in (number for number in reversed(supervised) if number in left):
            contained = [(i, _find_within(written[i], written[number], self.template)) for i in sorted(left)]
            spans = {i: span for i, span in contained if span is not None}
            examples.append(self._example(written[number], spans, messages[: indices[number] + 1], tools))
            left.difference_update(spans)
        return examples[::-1]

    def _example(
        self, written: WrittenAnswer, spans: dict[int, Span], messages: list[Message], tools: Any
    ) -> ChatExample:
        """Return the example of messages.

        spans: the positions of the supervised answers in the text, by number of the answer.
        """
        marks: list[Span] | None = None
        if self.renderer.marked:
            marks = [written.edit.move(mark) for mark in self.renderer.write(messages, tools, spans=True)[1]]
        answers = []
        for number, (start, stop) in spans.items():
            if marks is not None:
                inside = [mark for mark in marks if mark[1] > start and mark[0] < stop]
                if not inside:
                    raise _unlearnable(f"it does not mark answer {number + 1}")
                start = max(start, min(begin for begin, _ in inside))
                end = max(end for _, end in inside)
                if _strip_end(written.text[:stop], self.template).rstrip()[end:]:
                    stop = min(stop, end + len(self.template.first(written.text, end)))
            masked = 0
            if self.template.reasoning != "keep":
                empty = EMPTY_THINKING.match(written.text, start, stop)
                masked = empty.end() - start if empty else 0
            answers.append(AnswerSpan(number, start, stop, masked))
        return ChatExample(written.text, tuple(answers))

    def _weighted(self, chat: Chat, example: ChatExample, examples: list[ChatExample]) -> ChatExample:
        """Return one of a chat's examples with the weights of its characters. Raises RefusedError."""
        assert self._last_read is not None  # by `examples`
        _, messages, _ = self._last_read
        indices = assistant_indices(messages)
        answers = []
        for answer in example.answers:
            message = as_text(messages[indices[answer.number]])
            text = example.text[answer.start : answer.stop]
            asked = chat.weights[answer.number] if chat.weights else AnswerWeights()
            content = (0, 0, 0)
            if asked.parts is not None:
                row = json.loads(chat.messages)[indices[answer.number]]
                content = _find_content(row, message, _without_end_token(text, self.template))
            weights = asked.by_character(len(text), *content)
            if self.template.reasoning_weight != 1:
                prompt = example.text[: answer.start]
                for start, stop in self._find_reasoning(message, text, prompt, chat, examples):
                    inside = weights[start:stop]
                    weights[start:stop] = [self.template.reasoning_weight * weight for weight in inside]
            answers.append(answer._replace(weights=weights))
        return example._replace(answers=tuple(answers))

    def _find_reasoning(
        self, message: Message, answer: str, prompt: str, chat: Chat, examples: list[ChatExample]
    ) -> list[Span]:
        """Return where an answer has the reasoning of its message. Raises RefusedError.

        Args:
            message: The message as the template gets it, with text as content.
            answer: The text that the template writes for it.
            prompt: The text before the answer.
            chat: The chat of the message.
            examples: All examples of the chat.
        """
        spans = []
        for thought in dict.fromkeys(map(str.strip, reasoning_of(message))):  # two keys may have the same
            if not thought:
                continue
            start = _find_thought(thought, answer)
            if start is not None:
                spans.append((start, start + len(thought)))
                continue
            is_marked_out = self.renderer.marked and thought in prompt  # the template gives it no loss
            # Rows with fields that the template leaves out are counted or rejected elsewhere.
            if not is_marked_out and not {*THOUGHTS} & {*self.left_out(chat, examples)}:
                raise RefusedError("response_not_found", CHANGED_REASONING)
        return spans

    # --- one answer ---------------------------------------------------------------------------------------

    def _write_answer(self, messages: list[Message], tools: Any, index: int) -> WrittenAnswer:
        """Return the answer at an index of the messages, with its prompt. Raises RefusedError."""
        prompt, _ = self.renderer.write(messages[:index], tools, prompt=True)
        text, _ = self.renderer.write(messages[: index + 1], tools)
        edit = UNEDITED
        if not text.startswith(prompt) and (rest := self._after_dropped_text(messages, tools, index)):
            edit = Edit(kept=len(prompt) + len(rest) - len(text))
            text = prompt + rest
        if not text.startswith(prompt):
            text, edit = self._join_answer(messages[index], prompt, text)
        kind = "calls" if messages[index].get("tool_calls") else "answers"
        body, stop, end = self._find_end(text, len(prompt), kind)
        answer = text[len(prompt) : body]
        empty = EMPTY_THINKING.match(answer)
        if not answer[empty.end() if empty else 0 :].strip():
            raise _unlearnable(
                f"it {'does not write tool calls' if kind == 'calls' else 'leaves an answer out'}"
            )
        return WrittenAnswer(text[:stop] + end, len(prompt), end, edit)

    def _join_answer(self, message: Message, prompt: str, text: str) -> tuple[str, Edit]:
        """Return the answer of a text after a prompt that the text does not begin with, and the edit.

        Only white space or an open thinking tag at the end of the prompt may differ.
        """
        common = len(_common_prefix(prompt, text))
        opened = OPEN_TAG.search(prompt)
        start = opened.start() if opened and common < opened.end(1) else len(prompt.rstrip())
        if common < start:
            if reasoning_of(message) and EMPTY_THINKING.search(prompt, common - len("<think>")):
                raise _unlearnable(
                    "its prompt has an empty thinking block, and this answer has reasoning",
                    "Set data.reasoning=drop, or data.template_variables={enable_thinking: true}",
                )
            raise _unlearnable("it writes an answer in another way than it asks for one")
        rest = text[start:].lstrip("\n")
        thinking = close_thinking(message, prompt[start:], rest)
        if thinking is None:
            thinking, rest = "", text[common:]
        edit = Edit(inserted=len(prompt) + len(thinking) + len(rest) - len(text))
        return prompt + thinking + rest, edit

    def _find_end(self, text: str, start: int, kind: str) -> tuple[int, int, str]:
        """Return where the body of an answer that begins at `start` ends, where its end token ends, and the
        end token that must be appended.
        """
        written_end, end = self._ends[kind]
        body = start + len(_strip_end(text[start:], self.template))
        rest = text[body:].lstrip()
        if written_end and rest.startswith(written_end):
            return body, len(text) - len(rest) + len(written_end), ""
        if rest:
            return body, len(text.rstrip()), ""
        if not end:
            raise _unlearnable("no special token ends an answer in it, so that no end would be learned")
        return body, body, end

    def _after_dropped_text(self, messages: list[Message], tools: Any, index: int) -> str:
        """Return the text after the prompt if the answer makes the template drop an earlier part of it.

        gpt-oss writes the reasoning and the text of calls until their final answer comes. Mistral writes the
        system message in front of the last message if it is the user's. Without that part the prompt is the
        beginning of the text. Returns '' if it is not.
        """
        earlier = messages[:index]
        shorter = []
        if any(reasoning_of(message) for message in earlier if message["role"] == "assistant"):
            shorter.append([_without(message, REASONING) for message in earlier])
        if any(message.get("tool_calls") and message.get("content") for message in earlier):
            dropped = (*REASONING, "content")
            bare_calls = [_without(m, dropped) if m.get("tool_calls") else m for m in earlier]
            shorter.append(bare_calls)
        if messages[0]["role"] in PREFACES:
            shorter.append(earlier[1:])
        for bare in shorter:
            try:
                prompt, _ = self.renderer.write(bare, tools, prompt=True)
                text, _ = self.renderer.write([*bare, messages[index]], tools)
            except RefusedError:
                continue
            if text.startswith(prompt):
                return text[len(prompt) :]
        return ""

    @cached_property
    def _ends(self) -> dict[str, tuple[str, str]]:
        """Return how the template ends answers, and tool calls.

        The first text is written after them whether or not messages follow. The second is the special token
        that begins the next message, for a template that ends them with nothing else.
        """
        hello, answer = PROBE
        ends = {"answers": self._find_ends([hello, answer, hello], "")}
        result = {"role": "tool", "name": "f", "content": "Hello"}
        ends["calls"] = self._find_ends([hello, CALL_PROBE, result], ends["answers"][0])
        return ends

    def _find_ends(self, probe: list[Message], turn_end: str) -> tuple[str, str]:
        """Return how the template ends the second of three messages.

        Another end than `turn_end` is ignored.
        """
        probe = [as_parts(message) for message in probe] if self._takes_parts else probe
        for messages in (form(probe) for form in self._call_forms):
            try:
                after, _ = self.renderer.write(messages[:2], None)
                longer, _ = self.renderer.write(messages, None)
            except RefusedError:
                continue
            after, longer = (written.rpartition("World")[2] for written in (after, longer))
            common = _common_prefix(after, longer)
            while common and not self.template.last(common):
                common = common[:-1]
            after = after.rstrip()
            if self.template.last(after) and not common.endswith(turn_end):
                common = ""  # it closes the call, not the turn
            if longer.startswith(after) and not self.template.last(after):
                return "", _leading_special(longer[len(after) :], self.template)
            return common[len(_strip_end(common, self.template)) :].lstrip(), ""
        return "", ""

    # --- all answers in one rendering ---------------------------------------------------------------------

    def _locate(
        self, messages: list[Message], tools: Any, indices: list[int], last: WrittenAnswer
    ) -> dict[int, Span] | None:
        """Return the position of each answer in the text of the last one, or None if it is not certain."""
        if last.edit != UNEDITED:
            return None
        signed = SignedChat(messages, tools)
        try:
            text = SignedText(signed, self.renderer.write(signed.messages, signed.tools)[0])
        except RefusedError:
            return None
        body = len(last.text) - len(last.end)
        if text.plain[:body] != last.text[:body]:  # the signs changed what the template writes
            return None
        found = {len(indices) - 1: (last.start, len(last.text))}
        for number, index in enumerate(indices[:-1]):
            part = text.find_message(index)
            if part is None:
                return None
            roles = tuple(message["role"] for message in messages[max(0, index - 1) : index + 2])
            tags = tuple(tag[0] for tag in TAGS.finditer(str(messages[index].get("content"))))
            first = messages[0]["role"]  # some templates move a system message
            key = part.around, part.fields, signed.fields_of(index), tags, roles, first, bool(tools)
            if key not in self._offsets:
                span = _find_within(self._write_answer(messages, tools, index), last, self.template)
                if len(self._offsets) >= CACHE_SIZE:
                    self._offsets.clear()
                self._offsets[key] = span and (span[0] - part.start, span[1] - part.stop)
            offsets = self._offsets[key]
            if offsets is None:
                return None
            found[number] = part.start + offsets[0], part.stop + offsets[1]
        self._last_seen = signed, text.signs
        return dict(sorted(found.items()))

    # --- fields that are not written ----------------------------------------------------------------------

    def _left_out(self, messages: list[Message], tools: Any, examples: list[ChatExample]) -> list[str]:
        signed, seen = self._last_seen or self._find_signs(messages, tools, examples)
        if signed is None:
            return []
        indices = assistant_indices(messages)
        learned = {indices[answer.number] for example in examples for answer in example.answers}
        missing = {
            (index, field)
            for sign, (index, field) in enumerate(signed.fields)
            # Templates leave out the reasoning of earlier answers, as the model's prompt does.
            if sign not in seen and (field not in THOUGHTS or index in learned)
        }
        # A template reads one of the keys of reasoning, and `close_thinking` may have written it.
        thoughts = {index: reasoning_of(messages[index]) for index, field in missing if field in THOUGHTS}
        text = "".join(example.text for example in examples) if thoughts else ""
        tag_follows = r"\s*[<\[]"
        read = {signed.fields[sign][0] for sign in seen if signed.fields[sign][1] in THOUGHTS}
        written = {
            i
            for i in thoughts
            if all(re.search(re.escape(thought.strip()) + tag_follows, text) for thought in thoughts[i])
            or (i in read and len({thought.strip() for thought in thoughts[i]}) == 1)  # two keys, one text
        }
        return sorted({field for index, field in missing if field not in THOUGHTS or index not in written})

    def _find_signs(
        self, messages: list[Message], tools: Any, examples: list[ChatExample]
    ) -> tuple[SignedChat | None, set[int]]:
        """Return a chat with signs, and the signs in its examples. None if nothing can be missing."""
        signed = SignedChat(messages, tools)
        seen = set[int]()
        indices = assistant_indices(messages)
        for example in reversed(examples):
            end = indices[example.answers[-1].number]
            # Parts of the prompt that the template drops once the answer follows are in the example, too.
            for part, prompt in ((signed.messages[: end + 1], False), (signed.messages[:end], True)):
                try:
                    seen |= SignedText(signed, self.renderer.write(part, signed.tools, prompt)[0]).signs
                except RefusedError:
                    return None, seen  # signs in the fields make the template fail
                if len(seen) >= len(signed.fields):
                    return None, seen
        return signed, seen


def _find_content(row: Message, message: Message, answer: str) -> tuple[int, int, int]:
    """Return where an answer has the content of its message, and how many characters it lacks at its start.

    Raises RefusedError if that is not certain.

    row: the message in the row, whose offsets the weights have. message: as the template gets it, with text
    as content.
    """
    text = message.get("content")
    if isinstance(text, str) and text.strip() and text == row.get("content"):
        for core in dict.fromkeys((text, text.strip())):  # templates strip white space
            if answer.count(core) == 1:
                start = answer.find(core)
                return start, start + len(core), text.find(core)
    raise RefusedError(
        "response_not_found",
        "weights of parts of a content: the chat_template does not write this content unchanged and once. "
        "Set the weight of the message",
    )


def _find_thought(thought: str, answer: str) -> int | None:
    """Return where an answer has a text of reasoning, outside tags. None if it lacks it."""
    matches = re.finditer(f"{re.escape(thought)}|{MARKUP}", answer)
    return next((match.start() for match in matches if match[0] == thought), None)


def _unlearnable(
    problem: str, advice: str = "Use another template, or set data.template to chat"
) -> RefusedError:
    return RefusedError(
        "response_not_found", f"the chat_template cannot be learned from: {problem}. {advice}"
    )


def _find_within(part: WrittenAnswer, longer: WrittenAnswer, template: ChatTemplate) -> Span | None:
    """Return the position of an answer in a longer text, or None if that text begins in another way."""
    if part is longer:
        return part.start, len(part.text)
    stop = len(part.text) - len(part.end)
    if not longer.text.startswith(part.text[:stop]):
        return None
    following = _leading_special(longer.text[stop:], template) if part.end else ""
    return None if part.end and not following else (part.start, stop + len(following))


def _common_prefix(a: str, b: str) -> str:
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _leading_special(text: str, template: ChatTemplate) -> str:
    """Return the special token at the beginning of a text, with white space before it, or ''."""
    special = template.first(text.lstrip())
    return text[: len(text) - len(text.lstrip())] + special if special else ""


def _without_end_token(text: str, template: ChatTemplate) -> str:
    """Return an answer up to the special tokens at its end, with the white space before them."""
    rest = text[len(_strip_end(text, template)) :]
    return text.removesuffix(rest.lstrip())


def _strip_end(text: str, template: ChatTemplate) -> str:
    """Return a text without the special tokens and the white space at its end."""
    while last := template.last(text := text.rstrip()):
        text = text.removesuffix(last)
    return text


def _without(message: Message, keys: Sequence[str]) -> Message:
    """Return a message without some of its keys."""
    return {key: value for key, value in message.items() if key not in keys}
