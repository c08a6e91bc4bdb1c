"""Chats by a chat_template -> training examples: text, and which parts of it carry loss.

A prompt is what the template writes of the messages before an answer when it asks for one. The answer is
what it writes after that, up to the token that ends the turn. An example is a prompt and its answer. Answers
of one chat share an example where each prompt and answer is the beginning of the next. Templates that rewrite
history, for instance by dropping earlier reasoning, need one example for each answer.

Rendering every prompt would cost the square of the turns. So the chat is rendered once with signs around
every field. What stands between the signs tells where prompts and answers end. The first time that such
surroundings are seen, the prompt is rendered to learn them.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from emo.common.errors import UserError

from .chat_templates import (
    EMPTY_THINKING,
    REASONING,
    THOUGHT,
    ChatTemplate,
    RefusedError,
    Renderer,
    fixed_date,
)
from .signs import INSIDE, TAGS, Signed
from .templates import Chat

if TYPE_CHECKING:  # rows are read without it, and commands start fast
    import numpy as np

REMEMBERED = 4096  # surroundings at most
NEAR = 64  # characters on either side of the border between prompt and answer that decide its tokens
THOUGHTS = (*REASONING, INSIDE)
# What a template must not leave out. Other fields, such as name, are only counted.
CONTENT = (*THOUGHTS, "content", "system", "tool results", "tools", "tool_calls.name", "tool_calls.arguments")
PROBE: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "World"},
]
CALL_PROBE: dict[str, Any] = {  # an answer that calls a tool
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": "World"}}}],
}
OPENED = re.compile(r"(<(?:think|thinking|seed:think)>|\[THINK\])\s*\Z")  # at the end of a prompt


class Answer(NamedTuple):
    """An answer in the text of an example."""

    number: int  # among the assistant's messages
    start: int  # characters
    stop: int
    masked: int  # characters from `start` on that carry no loss: an empty thinking block


class Example(NamedTuple):
    """A text to train on."""

    text: str
    answers: tuple[Answer, ...]  # those that are supervised


class Written(NamedTuple):
    """An answer and all before it, as the template writes them."""

    text: str  # ends with the answer
    start: int
    end: str  # the special token that ends it, where the template writes none before the next message
    skipped: int  # characters before the answer that the template itself does not write there
    shift: int = 0  # characters of the prompt that the template drops as soon as the answer follows


class ChatWriter:
    """Examples of chats by one template. Remembers what it learned of the template."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template, self.renderer = template, Renderer(template)
        self._read: tuple[Chat, list[dict[str, Any]], Any] | None = None  # the last chat, and what it holds
        self._seen: set[int] | None = None  # the signs in its text, if it has one example
        self._signed: Signed | None = None
        self._surroundings: dict[Any, tuple[int, int] | None] = {}

    def examples(self, chat: Chat, exact: bool = False) -> list[Example]:
        """Return the examples of a chat. Raises RefusedError. exact: render every prompt."""
        return self._by_form(chat, lambda messages, tools: self._examples(chat, messages, tools, exact))

    def prompt(self, messages: list[dict[str, Any]]) -> str:
        """Return messages as text, up to where an answer begins. Raises RefusedError."""
        messages = [_as_parts(message) for message in messages] if self._takes_parts else messages
        protected, _ = self.renderer.protect(messages, None)
        return self.renderer.write(protected, None, prompt=True)[0]

    def left_out(self, chat: Chat, examples: list[Example]) -> list[str]:
        """Return the fields of a chat of which something is in none of its examples."""
        return self._by_form(chat, lambda messages, tools: self._left_out(messages, tools, examples))

    def _by_form(self, chat: Chat, function: Any) -> Any:
        """Return what a function of messages and tools gives for the first form of calls that it accepts."""
        if self._read is None or self._read[0] is not chat:  # they are asked for twice
            self._read, self._seen = (chat, *self._messages(chat)), None
        _, messages, tools = self._read
        calls = any(message.get("tool_calls") for message in messages)
        refused = None
        # The form of a chat depends on the template and on the chat alone: never on the rows before it.
        for form in self._forms if calls else FORMS[:1]:
            try:
                return function(form(messages), tools)
            except RefusedError as error:
                # What the template says of one form matters less than why another is of no use.
                if refused is None or refused.reason == "refused_by_chat_template":
                    refused = error
        assert refused is not None
        raise refused

    @cached_property
    def _forms(self) -> list[Any]:
        """Return the forms that calls may have. The first is the one in which a plain call is written.

        Arguments as JSON text count only where the template writes them as they are: one that encodes them
        would encode them twice.
        """
        for form in FORMS:
            try:
                text, _ = self.renderer.write(form([PROBE[0], CALL_PROBE]), None)
            except RefusedError:
                continue
            if "World" not in text or '\\"World' in text:
                continue
            if form is _calls_as_text:
                return [form]
            return [form, *(other for other in FORMS if other is not form)]
        return [FORMS[0]]

    def _messages(self, chat: Chat) -> tuple[list[dict[str, Any]], Any]:
        """Return the messages and tools of a chat as the template gets them."""
        messages = json.loads(chat.messages)
        places = _assistant_places(messages)
        learned = [place for number, place in enumerate(places) if number not in chat.unsupervised]
        messages = messages[: learned[-1] + 1]  # nothing is learned from what comes after
        for message in messages if self.template.reasoning != "keep" else ():
            if message["role"] == "assistant":
                self._remove_reasoning(message)
        if self._takes_parts:
            messages = [_as_parts(message) for message in messages]
        return self.renderer.protect(messages, json.loads(chat.tools) if chat.tools else None)

    def _remove_reasoning(self, message: dict[str, Any]) -> None:
        """Remove reasoning that is empty or, by data.reasoning, not learned."""
        drop, content = self.template.reasoning == "drop", message.get("content")
        for key in REASONING:
            value = message.get(key)
            if drop or (isinstance(value, str) and not value.strip()):
                message.pop(key, None)
        thought = THOUGHT.match(content) if isinstance(content, str) else None
        if thought and isinstance(content, str) and (drop or not thought[2].strip()):
            message["content"] = content[thought.end() :]

    @cached_property
    def _takes_parts(self) -> bool:
        """Return whether the template takes content as a list of parts only, as those of vision models do."""
        written = []
        for messages in (PROBE, [_as_parts(message) for message in PROBE]):
            try:
                written.append(self.renderer.write(messages, None)[0])
            except RefusedError:
                written.append("")
        return "World" not in written[0] and "World" in written[1] and "'text'" not in written[1]

    def _examples(self, chat: Chat, messages: list[dict[str, Any]], tools: Any, exact: bool) -> list[Example]:
        self._seen = None
        places = _assistant_places(messages)
        last = self._written(messages, tools, places[-1])
        learned = [number for number in range(len(places)) if number not in chat.unsupervised]
        if not exact and len(places) > 1:
            found = self._located(messages, tools, places, last)
            if found is not None:
                return [self._example(last, {i: found[i] for i in learned}, messages, tools)]
        written = {i: self._written(messages, tools, places[i]) for i in learned[:-1]} | {learned[-1]: last}
        examples: list[Example] = []
        left = set(learned)
        for number in (number for number in reversed(learned) if number in left):
            within = [(i, _within(written[i], written[number], self.template)) for i in sorted(left)]
            spans = {i: span for i, span in within if span is not None}
            examples.append(self._example(written[number], spans, messages[: places[number] + 1], tools))
            left.difference_update(spans)
        return examples[::-1]

    def _written(self, messages: list[dict[str, Any]], tools: Any, place: int) -> Written:
        """Return the answer at a place of the messages, with its prompt. Raises RefusedError."""
        before, _ = self.renderer.write(messages[:place], tools, prompt=True)
        after, _ = self.renderer.write(messages[: place + 1], tools)
        skipped = shift = 0
        if not after.startswith(before) and (said := self._after_reasoning(messages, tools, place)):
            shift = len(before) + len(said) - len(after)
            after = before + said
        if not after.startswith(before):
            common, opened = len(_common(before, after)), OPENED.search(before)
            start = opened.start() if opened and common < opened.end(1) else len(before.rstrip())
            if common < start:
                if _reasoning(messages[place]) and EMPTY_THINKING.search(before, common - len("<think>")):
                    raise _unclear(
                        "its prompt has an empty thinking block, and this answer has reasoning",
                        "Set data.reasoning=drop, or data.template_variables={enable_thinking: true}",
                    )
                raise _unclear("it writes an answer in another way than it asks for one")
            bridge = _thoughts(messages[place], before[start:])
            rest = after[start:].lstrip("\n") if bridge else after[common:]
            skipped = len(before) + len(bridge) + len(rest) - len(after)
            after = before + bridge + rest
        kind = "calls" if messages[place].get("tool_calls") else "answers"
        kept, end = self._ends[kind]
        body = len(before) + len(_unended(after[len(before) :], self.template))
        rest = after[body:].lstrip()
        stop = len(after) - len(rest)
        if kept and rest.startswith(kept):
            stop, end = stop + len(kept), ""
        elif rest:
            stop, end = len(after.rstrip()), ""
        else:
            stop = body
        if stop == body and not end:
            raise _unclear("no special token ends an answer in it, so that no end would be learned")
        answer = after[len(before) : body]
        empty = EMPTY_THINKING.match(answer)
        if not answer[empty.end() if empty else 0 :].strip():
            what = "does not write tool calls" if kind == "calls" else "leaves an answer out"
            raise _unclear(f"it {what}")
        return Written(after[:stop] + end, len(before), end, skipped, shift)

    def _after_reasoning(self, messages: list[dict[str, Any]], tools: Any, place: int) -> str:
        """Return what is written after the prompt where the answer makes the template drop earlier reasoning.

        gpt-oss writes the reasoning of calls until their final answer comes. Without it in the chat, the
        prompt is the beginning of the text. Return '' where it is not.
        """
        if not any(_reasoning(message) for message in messages[:place] if message["role"] == "assistant"):
            return ""
        bare = [{k: v for k, v in message.items() if k not in REASONING} for message in messages[:place]]
        before, _ = self.renderer.write(bare, tools, prompt=True)
        after, _ = self.renderer.write([*bare, messages[place]], tools)
        return after[len(before) :] if after.startswith(before) else ""

    @cached_property
    def _ends(self) -> dict[str, tuple[str, str]]:
        """Return how the template ends answers, and calls of tools.

        The first is what it writes after them whether or not messages follow. The second is the special token
        that begins the next message, where it ends them by nothing else.
        """
        hello, answer = PROBE
        ends = {}
        for kind, probe in {
            "answers": [hello, answer, hello],
            "calls": [hello, CALL_PROBE, {"role": "tool", "name": "f", "content": "Hello"}],
        }.items():
            ends[kind] = ("", "")
            probe = [_as_parts(message) for message in probe] if self._takes_parts else probe
            for messages in (form(probe) for form in self._forms):
                try:
                    after, _ = self.renderer.write(messages[:2], None)
                    longer, _ = self.renderer.write(messages, None)
                except RefusedError:
                    continue
                after, longer = (written.rpartition("World")[2] for written in (after, longer))
                kept = _common(after, longer)
                while kept and not self.template.last(kept):
                    kept = kept[:-1]
                after = after.rstrip()
                if self.template.last(after) and not kept.endswith(ends.get("answers", ("", ""))[0]):
                    kept = ""  # it closes the call, not the turn
                ends[kind] = kept[len(_unended(kept, self.template)) :].lstrip(), ""
                if longer.startswith(after) and not self.template.last(after):
                    ends[kind] = "", _beginning(longer[len(after) :], self.template)
                break
        return ends

    def _located(
        self, messages: list[dict[str, Any]], tools: Any, places: list[int], last: Written
    ) -> dict[int, tuple[int, int]] | None:
        """Return where each answer is in the text of the last one, or None where it is not certain."""
        if last.skipped or last.shift:
            return None
        signed = Signed(messages, tools)
        try:
            plain, seen = signed.read(self.renderer.write(signed.messages, signed.tools)[0])
        except RefusedError:
            return None
        body = len(last.text) - len(last.end)
        if plain[:body] != last.text[:body]:  # the signs steered the template
            return None
        at = [0, *(start for _, start in seen), len(plain)]  # of sighting i: at[i + 1]
        owned: dict[int, dict[int, int]] = {}  # of each message: sign, and the number of its first sighting
        for number, (sign, _) in enumerate(seen, 1):
            owned.setdefault(signed.fields[sign][0], {}).setdefault(sign, number)
        found = {len(places) - 1: (last.start, len(last.text))}
        for number, place in enumerate(places[:-1]):
            mine = owned.get(place)
            if not mine:
                return None
            low, high = min(mine.values()), max(mine.values())
            if any(signed.fields[sign][0] != place for sign, _ in seen[low - 1 : high]):
                return None  # another message is written in the middle of it
            around = plain[at[low - 1] : at[low]], plain[at[high] : at[high + 1]]
            shape = tuple(signed.fields[sign][1] for sign in mine)
            have = tuple(field for owner, field in signed.fields if owner == place)
            roles = tuple(message["role"] for message in messages[max(0, place - 1) : place + 2])
            tags = tuple(tag[0] for tag in TAGS.finditer(str(messages[place].get("content"))))
            key = around, shape, have, tags, roles, bool(tools)
            if key not in self._surroundings:
                span = _within(self._written(messages, tools, place), last, self.template)
                if len(self._surroundings) >= REMEMBERED:
                    self._surroundings.clear()
                self._surroundings[key] = span and (span[0] - at[low], span[1] - at[high])
            offsets = self._surroundings[key]
            if offsets is None:
                return None
            found[number] = at[low] + offsets[0], at[high] + offsets[1]
        self._signed, self._seen = signed, {sign for sign, _ in seen}
        return dict(sorted(found.items()))

    def _example(
        self, written: Written, spans: dict[int, tuple[int, int]], messages: list[dict[str, Any]], tools: Any
    ) -> Example:
        """Return the example that messages become; spans: where the answers are that carry loss."""
        marks: list[tuple[int, int]] = []
        if self.renderer.marked:
            _, marks = self.renderer.write(messages, tools, spans=True)
            if written.skipped or written.shift:  # what was put in between is said by the assistant
                marks = [(a + written.shift, b + written.shift + written.skipped) for a, b in marks]
        answers = []
        for number, (start, stop) in spans.items():
            if self.renderer.marked:
                inside = [(a, b) for a, b in marks if b > start and a < stop]
                if not inside:
                    raise _unclear(f"it does not mark answer {number + 1}")
                start = max(start, min(a for a, _ in inside))
                end = max(b for _, b in inside)
                if _unended(written.text[:stop], self.template).rstrip()[end:]:
                    stop = min(stop, end + len(self.template.first(written.text, end)))
            masked = 0
            if self.template.reasoning != "keep":
                empty = EMPTY_THINKING.match(written.text, start, stop)
                masked = empty.end() - start if empty else 0
            answers.append(Answer(number, start, stop, masked))
        return Example(written.text, tuple(answers))

    def _left_out(self, messages: list[dict[str, Any]], tools: Any, examples: list[Example]) -> list[str]:
        places = _assistant_places(messages)
        signed = Signed(messages, tools) if self._signed is None or self._seen is None else self._signed
        seen = self._seen or set()
        for example in reversed(examples) if self._seen is None else ():
            part = signed.messages[: places[example.answers[-1].number] + 1]
            try:
                seen.update(sign for sign, _ in signed.read(self.renderer.write(part, signed.tools)[0])[1])
            except RefusedError:
                return []  # signs in its fields make the template fail
            if len(seen) >= len(signed.fields):
                return []
        lacking = {field for sign, field in enumerate(signed.fields) if sign not in seen}
        # A template reads one of the keys of reasoning, and `_thoughts` may have written it.
        thoughts = {place: _reasoning(messages[place]) for place, field in lacking if field in THOUGHTS}
        whole = "".join(example.text for example in examples) if thoughts else ""
        ended = r"\s*[<\[]"  # a tag follows
        read = {signed.fields[sign][0] for sign in seen if signed.fields[sign][1] in THOUGHTS}
        written = {
            i
            for i in thoughts
            if all(re.search(re.escape(t.strip()) + ended, whole) for t in thoughts[i])
            or (i in read and len({t.strip() for t in thoughts[i]}) == 1)  # two keys of the same text
        }
        return sorted({field for place, field in lacking if field not in THOUGHTS or place not in written})


def _assistant_places(messages: list[dict[str, Any]]) -> list[int]:
    """Return the positions of the assistant's messages."""
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _unclear(why: str, advice: str = "Use another template, or set data.template to chat") -> RefusedError:
    return RefusedError("response_not_found", f"the chat_template cannot be learned from: {why}. {advice}")


def _within(part: Written, whole: Written, template: ChatTemplate) -> tuple[int, int] | None:
    """Return where an answer is in a longer text, or None where that begins in another way."""
    if part is whole:
        return part.start, len(part.text)
    stop = len(part.text) - len(part.end)
    if not whole.text.startswith(part.text[:stop]):
        return None
    following = _beginning(whole.text[stop:], template) if part.end else ""
    return None if part.end and not following else (part.start, stop + len(following))


def _common(a: str, b: str) -> str:
    """Return what two texts begin with."""
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _beginning(text: str, template: ChatTemplate) -> str:
    """Return the special token that begins a text, with white space before it, or ''."""
    special = template.first(text.lstrip())
    return text[: len(text) - len(text.lstrip())] + special if special else ""


def _unended(text: str, template: ChatTemplate) -> str:
    """Return a text without the special tokens and the white space at its end."""
    while last := template.last(text := text.rstrip()):
        text = text.removesuffix(last)
    return text


def _reasoning(message: dict[str, Any]) -> list[str]:
    """Return what an assistant's message holds of reasoning."""
    thoughts = [message[key] for key in REASONING if isinstance(message.get(key), str)]
    content = message.get("content")
    match = THOUGHT.match(content) if isinstance(content, str) else None
    return [*thoughts, *([match[2]] if match else [])]


def _thoughts(message: dict[str, Any], opened: str) -> str:
    """Return what comes between a prompt that ends with an open tag of thinking and the answer."""
    tag = OPENED.search(opened)
    if tag is None:
        return ""
    thought = "\n".join(dict.fromkeys(thought.strip() for thought in _reasoning(message)))
    close = tag[1].replace("<", "</").replace("[", "[/")
    return f"{thought}\n{close}\n\n"


def _as_it_is(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return messages


def _with_content(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which every call has a content, as templates expect that add to it."""
    return [
        message | {"content": message.get("content") or ""} if message.get("tool_calls") else message
        for message in messages
    ]


def _calls_as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as older templates expect calls: arguments as JSON text, and a content."""
    changed = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            inner = [call.get("function") if isinstance(call, dict) else None for call in calls]
            texts = [
                call
                if not isinstance(function, dict) or isinstance(function.get("arguments"), str)
                else call
                | {
                    "function": function
                    | {"arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}
                }
                for call, function in zip(calls, inner, strict=True)
            ]
            message = message | {"content": message.get("content") or "", "tool_calls": texts}
        changed.append(message)
    return changed


FORMS = (_as_it_is, _with_content, _calls_as_text)  # of messages with calls


def _as_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def check_template(template: ChatTemplate) -> list[str]:
    """Return notes for the user: about a date, and about an answer that ends with another token than EOS."""
    try:
        ((text, _),) = ChatWriter(template).examples(Chat(json.dumps(PROBE)))
    except RefusedError as error:
        raise UserError(
            f"the tokenizer's chat_template cannot be used: {error.detail}", code="template-unusable"
        ) from None
    notes = []
    if "strftime_now" in template.text:
        day = fixed_date(json.loads(template.variables))
        notes.append(
            f"note: the chat_template writes the date of the day. The data get {day}; "
            "data.template_variables={date: YYYY-MM-DD} sets another"
        )
    if (end := template.last(text)) != (eos := dict(template.names).get("eos_token")):
        notes.append(f"note: the chat_template ends an answer with {end}, not with EOS ({eos})")
    return notes


class ChatEncoder:
    """Encodes chats with a saved tokenizer: special tokens of the template are such, people's are text.

    Answers are encoded apart from what is before them, so that no token belongs to both, and a prompt has the
    very ids that `apply_chat_template` gives at generation.
    """

    def __init__(self, directory: Path, template: ChatTemplate) -> None:
        from .words import encoder

        self.writer = ChatWriter(template)
        self.beginning = encoder(directory, markup=True)
        self.continuing = encoder(directory, continuing=True, markup=True)
        self.spoken = encoder(directory, continuing=True)
        tokens = "|".join(map(re.escape, template.specials))  # the longest first
        self.specials = re.compile(tokens) if tokens else None

    def encode(self, chat: Chat) -> list[tuple[list[int], np.ndarray]]:
        """Return the examples of a chat: ids, and int64 [answers, 2], which of them are supervised."""
        import numpy as np

        encoded = []
        for example in self.writer.examples(chat):
            ids: list[int] = []
            supervised = []
            done, end = 0, ""  # how far the text is encoded, and the special token before that
            for number, answer in enumerate(example.answers, 1):
                # After a special token some tokenizers put a space, so that it must be seen.
                context, _ = self._ids(end + example.text[done : answer.start], self.beginning)
                prompt = ids + context[bool(end) :]
                text = example.text[answer.start : answer.stop]
                said, ends = self._ids(text, self.continuing, answer.masked > 0)
                supervised.append(
                    (len(prompt) + sum(stop <= answer.masked for stop in ends), len(prompt) + len(said))
                )
                if number < len(example.answers) and self._merges(example.text[: answer.start], text):
                    # Later prompts hold this answer with other ids: they are another example.
                    encoded.append((prompt + said, np.array(supervised, np.int64)))
                    supervised = []
                    continue
                ids = prompt + said
                done, end = answer.stop, self.writer.template.last(example.text[: answer.stop])
            encoded.append((ids, np.array(supervised, np.int64)))
        return encoded

    def _merges(self, prompt: str, answer: str) -> bool:
        """Return whether the ids of a prompt change as soon as the answer follows, in one text."""
        tail = prompt[-NEAR:]
        if self.specials:
            tail = tail[max((match.start() for match in self.specials.finditer(tail)), default=0) :]
        alone, _ = self._ids(tail, self.beginning)
        both, _ = self._ids(tail + answer[:NEAR], self.beginning)
        return both[: len(alone)] != alone

    def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the ids of messages, up to where an answer begins, as training shows them."""
        return self._ids(self.writer.prompt(messages), self.beginning)[0]

    def _ids(self, text: str, tokenizer: Any, ended: bool = False) -> tuple[list[int], list[int]]:
        """Return the ids of a stretch and, if asked for, where those of its first piece end.

        The special tokens that people wrote in it are encoded as text.
        """
        ids: list[int] = []
        ends: list[int] = []
        for i, piece in enumerate(self.writer.renderer.patterns[False][1].split(text)):
            if not piece:  # None for a lone mark
                continue
            by = self.spoken if i % 2 else tokenizer if i == 0 else self.continuing
            # After a special token of the template the tokenizer begins a text again.
            special = self.specials.search(piece) if by is self.continuing and self.specials else None
            cut = special.start() if special else len(piece)
            for start, part, encodes in ((0, piece[:cut], by), (cut, piece[cut:], self.beginning)):
                if part:
                    encoding = encodes.encode(part, add_special_tokens=False)
                    ids += encoding.ids
                    ends += [start + stop for _, stop in encoding.offsets] if ended and i == 0 else []
        return ids, ends
