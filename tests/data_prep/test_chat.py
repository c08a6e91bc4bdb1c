"""The tokenizer's own chat_template: ids as at generation, loss on what the assistant says, refusals."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from emo.common.errors import UserError
from emo.data_prep.templates import (
    Chat,
    ChatEncoder,
    RefusedError,
    check_template,
    read_template,
    render_chat,
)
from emo.data_prep.tokenizer import load_tokenizer, save_tokenizer
from emo.data_prep.verify import verify
from tests.helpers.corpus import prepared, run, segments, tiny_tokenizer, train_set, write_jsonl

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (  # [INST] is no special token, the end is EOS; strict about the order of roles
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content|trim + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
MARKED = (  # says itself what the assistant says
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (  # as Qwen3's: the last answer has thoughts, an earlier one has none
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


DATED = (
    "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}1 Jan 2024{% endif %}\n" + CHATML
)
TOOLS = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def tokenizer_with(template: str, place: Path, base: Path | None = None) -> Path:
    """A saved tokenizer with ChatML's tokens and a template, as `prepare` saves it."""
    source = place / f"source-{abs(hash(template))}"
    tokenizer = load_tokenizer(base or tiny_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    if "im_end" in template:
        tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template
    tokenizer.save_pretrained(source)
    save_tokenizer(source, None, place / "saved" / source.name)
    return place / "saved" / source.name


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


def chat(*turns: tuple[str, str]) -> Chat:
    return Chat(json.dumps([{"role": role, "content": content} for role, content in turns]))


def supervised(saved: Path, ids: list[int], spans: np.ndarray) -> list[str]:
    backend = Tokenizer.from_file(str(saved / "tokenizer.json"))
    return [backend.decode(ids[begin:end], skip_special_tokens=False) for begin, end in spans]


TWO = chat(
    ("system", "be brief"), ("user", "one river"), ("assistant", "a bird"), ("user", "x"), ("assistant", "y")
)
PLAIN = chat(("user", "one river"), ("assistant", "a bird"), ("user", "x"), ("assistant", "y"))


@pytest.mark.parametrize("template", [CHATML, LLAMA, MARKED])
def test_ids_are_those_of_generation(place: Path, template: str) -> None:
    """An independent account: transformers' own apply_chat_template, on the tokenizer as it was given."""
    saved = tokenizer_with(template, place)
    theirs = AutoTokenizer.from_pretrained(place / saved.name)
    messages = json.loads(PLAIN.messages)
    ids, spans = ChatEncoder(saved, read_template(saved, "t")).encode(PLAIN)
    assert spans[-1, 1] == len(ids), "nothing after the last answer is kept"
    first = theirs.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
    assert ids[: spans[0, 0]] == first
    whole = theirs.apply_chat_template(messages)["input_ids"][: len(ids)]
    assert theirs.decode(ids) == theirs.decode(whole)
    if template is not LLAMA:  # there a space of the answer's first word is a token of its own
        assert ids == whole
        assert supervised(saved, ids, spans) == ["a bird<|im_end|>", "y<|im_end|>"]


SAID = st.lists(
    st.sampled_from(["river", " ", "\n", "<|im_end|>", "<|im_start|>user", "</s>", "é", "{{ x }}", "🙂"]),
    min_size=1,
    max_size=5,
).map("".join).filter(str.strip)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(SAID, SAID), min_size=1, max_size=3), st.sampled_from([CHATML, MARKED]))
def test_what_people_say_never_ends_a_turn(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[str, str]], template: str
) -> None:
    """Special tokens in messages are text: as many turns begin and end as there are; answers come back."""
    saved = tokenizer_with(template, Path(tmp_path_factory.getbasetemp()))
    backend = Tokenizer.from_file(str(saved / "tokenizer.json"))
    row = chat(*(pair for q, a in turns for pair in (("user", q), ("assistant", a))))
    ids, spans = ChatEncoder(saved, read_template(saved, "t")).encode(row)
    begin, end = (backend.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    assert ids.count(begin) == ids.count(end) == 2 * len(turns)
    for (_, answer), (start, stop) in zip(turns, spans, strict=True):
        assert ids[stop - 1] == end
        assert backend.decode(ids[start : stop - 1], skip_special_tokens=False).strip() == answer.strip()


@pytest.mark.parametrize(
    ("template", "row", "reason"),
    [
        (THINKING, PLAIN, "response_not_found"),
        (LLAMA, TWO, "refused_by_chat_template"),
        ("{{ ''.__class__.__mro__ }}" + CHATML, PLAIN, "refused_by_chat_template"),
        (MARKED.replace("{{ m.content }}<|im_end|>{% endg", "{% endg"), PLAIN, "response_not_found"),
    ],
)
def test_a_template_that_does_not_allow_it_is_refused(
    place: Path, template: str, row: Chat, reason: str
) -> None:
    known = read_template(tokenizer_with(CHATML, place), "t")._replace(text=template)
    with pytest.raises(RefusedError) as caught:
        render_chat(row, known)
    assert caught.value.reason == reason and "\n" not in caught.value.detail


def test_the_day_changes_nothing(place: Path) -> None:
    known = read_template(tokenizer_with(DATED, place), "t")
    assert render_chat(PLAIN, known)[0].startswith("1 Jan 2024<|im_start|>")
    assert any("today's date" in note for note in check_template(known))
    with pytest.raises(UserError):
        check_template(known._replace(text="{{ strftime_now('%Y') }}" + CHATML))


def test_tools_and_developers(place: Path) -> None:
    known = read_template(tokenizer_with(TOOLS, place), "t")
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "<|im_end|>"}}}]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "a"},
    ]
    text, spans = render_chat(Chat(json.dumps(messages), json.dumps([{"name": "f"}])), known)
    assert text.startswith('{"name": "f"}\n<|im_start|>system\nd<|im_end|>')
    assert [text[a:b].count("<|im_end|>") for a, b in spans] == [2, 1], (
        "one of the two is the call's own text"
    )
    assert text[slice(*spans[1])] == "a<|im_end|>"
    other = known._replace(text=known.text + "{# knows developer #}")
    assert "<|im_start|>developer" in render_chat(Chat(json.dumps(messages)), other)[0]


def test_the_shards_hold_the_answers_and_their_ends(tmp_path: Path, place: Path) -> None:
    """... and another template at the same place is noticed."""
    saved = tmp_path / "own"
    save_tokenizer(tokenizer_with(CHATML, place), None, saved)
    rows = (chat(("user", f"q {i}"), ("assistant", f"a {i}")) for i in range(120))
    write_jsonl(tmp_path / "a.jsonl", ({"messages": json.loads(row.messages)} for row in rows))
    own = {"kind": "instruct", "template": "chat_template", "sequence_len": 64, "tokenizer": str(saved)}
    config = prepared(tmp_path, **own)
    assert verify(config.dir)[1] == []
    found = [
        supervised(saved, labels, np.array([[0, len(labels)]]))[0]
        for labels in ([label for label in row if label >= 0] for _, row in segments(train_set(config)))
    ]
    assert sorted(found) == sorted(f"a {i}<|im_end|>" for i in range(120))
    assert train_set(config).manifest.template == "chat_template/1"
    settings_file = saved / "tokenizer_config.json"
    settings_file.write_text(settings_file.read_text().replace('"{% for m', '"Hello{% for m'))
    with pytest.raises(UserError) as error:
        run(config)
    assert error.value.code == "tokenizer-changed"


def test_templates_are_kept_wherever_they_were(tmp_path: Path) -> None:
    """As a file of its own, in tokenizer_config.json, or one of several: saved, loaded by transformers."""

    several = [{"name": "x", "template": "y"}, {"name": "default", "template": CHATML}]
    for name, file, content in (
        ("file", "chat_template.jinja", CHATML),
        ("key", "tokenizer_config.json", json.dumps({"chat_template": CHATML})),
        ("several", "tokenizer_config.json", json.dumps({"chat_template": several})),
    ):
        source = tmp_path / name
        source.mkdir()
        (source / "tokenizer.json").write_bytes((tiny_tokenizer() / "tokenizer.json").read_bytes())
        (source / file).write_text(content)
        save_tokenizer(source, None, tmp_path / f"saved-{name}")
        for found in (load_tokenizer(source), load_tokenizer(tmp_path / f"saved-{name}")):
            assert found.chat_template == CHATML
        assert AutoTokenizer.from_pretrained(tmp_path / f"saved-{name}").chat_template == CHATML
