"""Chat templates of current models give correct examples and losses, and omitted fields are reported."""

from __future__ import annotations

import datetime
import json
import math
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from emo.common.errors import UserError
from emo.data_prep.config import DataConfig
from emo.data_prep.encoding.chat_templates import RefusedError, Renderer, read_template
from emo.data_prep.encoding.chat_writer import ChatWriter
from emo.data_prep.encoding.chats import ChatEncoder
from emo.data_prep.encoding.templates import Conversation, Exchange, render
from emo.data_prep.encoding.tokenizer import save_tokenizer
from emo.data_prep.selection.plan import Plan
from emo.data_prep.shards.verify import verify
from tests.helpers.chat_templates import CALLING, CHATML, MISTRAL, THINKING, TOOLS, tokenizer_with
from tests.helpers.corpus import (
    data_config,
    prepared,
    run,
    segments,
    tiny_tokenizer,
    train_set,
    write_jsonl,
)
from tests.helpers.refusals import refused
from tests.helpers.stock_templates import (
    KINDS,
    TOOL,
    compare,
    messages_of,
    read_chat,
    stand_in,
    stock_templates,
)

needs_trl = pytest.mark.skipif(
    not stock_templates(), reason="trl, whose templates these are, is not installed"
)
FAMILIES = [
    "cohere2", "deepseekv3", "diffusion_gemma_training", "gemma4", "glm4moe", "gptoss", "lfm2_2_5",
    "llama3_1", "mistral", "muse_glimmer", "nemotron_3_5_lightning", "phi3", "phi3_training", "qwen2_5",
    "qwen3", "qwen3_5_think", "smolvlm",
]  # fmt: skip


def talk(*turns: tuple[str, str], **last: Any) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in turns]
    messages[-1] |= last
    return {"messages": messages}


def writer_of(template: str, **settings: Any) -> ChatWriter:
    return ChatWriter(read_template(tokenizer_with(template), "t", **settings))


def test_a_template_without_tools_is_reported() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    row = read_chat(talk(("user", "q"), ("assistant", ""), tool_calls=[call]))
    with pytest.raises(RefusedError, match="does not write tool calls"):
        writer_of(CHATML).examples(row)


def learned(writer: ChatWriter, row: dict[str, Any]) -> list[str]:
    """Return the supervised texts of a row."""
    examples = writer.examples(read_chat(row))
    return [text[a.start + a.masked : a.stop] for text, answers in examples for a in answers]


def chats(config: DataConfig) -> list[tuple[str, str]]:
    """Return all training examples as text, each with its supervised text."""
    backend = Tokenizer.from_file(str(config.dir / "tokenizer/tokenizer.json"))
    texts = []
    for ids, labels in segments(train_set(config)):
        said = [label for label in labels if label >= 0]
        texts.append(tuple(backend.decode(each, skip_special_tokens=False) for each in (ids, said)))
    return sorted(texts)  # type: ignore[arg-type]


def options(text: str, **more: Any) -> dict[str, Any]:
    saved = str(tokenizer_with(text))
    return {"kind": "instruct", "template": "chat_template", "tokenizer": saved, "sequence_len": 400} | more


@needs_trl
@pytest.mark.parametrize("name", FAMILIES)
def test_examples_are_prompts_of_generation_and_answers(name: str) -> None:
    """An independent implementation renders every prompt. `make template-test` checks all templates."""
    outcomes = {}
    for kind in KINDS:
        outcome, why = compare(name, messages_of(2, kind))
        assert outcome != "different", f"{kind}: {why}"
        outcomes[kind] = outcome
    assert outcomes["plain"] == outcomes["system"] == outcomes["thoughts"] == "equal"


@needs_trl
@pytest.mark.parametrize("name", ["qwen3", "lfm2_2_5", "gptoss", "mistral"])
def test_signs_give_the_same_examples_as_rendering_every_prompt(name: str) -> None:
    """A writer that remembers earlier chats agrees with exact rendering for chats of many shapes."""
    rng = random.Random(1)
    writer = ChatWriter(read_template(stand_in(name)[1], name))
    for _ in range(25):
        messages: list[dict[str, Any]] = []
        for turn in range(rng.randint(2, 4)):
            messages.append({"role": "user", "content": rng.choice(("Ask", " spaced ", "<think>x</think>"))})
            if rng.random() < 0.4:
                call = {"function": {"name": "f", "arguments": rng.choice(({"x": "y"}, {"n": 1}, {}))}}
                messages += [
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "name": "f", "content": "result"},
                ]
            said = rng.choice(("Yes", "<think>\nhm\n</think>\n\nSo", "<think></think>Bare", "End \n"))
            messages.append({"role": "assistant", "content": f"{said}{turn}"})
            if rng.random() < 0.4:
                messages[-1]["reasoning_content"] = "Because"
        chat = read_chat({"messages": messages})
        results = []
        for exact in (False, True):
            try:
                results.append(writer.examples(chat, exact))
            except RefusedError as error:
                results.append([error.detail])  # type: ignore[list-item]
        assert results[0] == results[1]


def test_long_chats_are_rendered_as_often_as_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, write, calls = writer_of(CHATML), Renderer.write, []
    monkeypatch.setattr(
        Renderer, "write", lambda self, *args, **more: calls.append(1) or write(self, *args, **more)
    )
    counts = []
    for turns in (3, 40):
        for row in range(2):
            calls.clear()
            ((_, answers),) = writer.examples(read_chat(messages_of(turns, "plain")))
            assert [answer.number for answer in answers] == list(range(turns)), row
        counts.append(len(calls))
    assert counts[0] == counts[1] == 3


def test_rewritten_history_gives_one_example_per_answer(tmp_path: Path) -> None:
    """The examples belong to one source document, so that confidence intervals group them."""
    rows = [
        talk(("user", f"q{i}"), ("assistant", f"a{i}"), ("user", "r"), ("assistant", "b")) for i in range(30)
    ]
    write_jsonl(tmp_path / "a.jsonl", rows)
    config = prepared(tmp_path, **options(THINKING))
    data = train_set(config)
    assert not verify(config.dir)[1]
    assert (data.manifest.documents, data.manifest.segments) == (30, 60)
    sources = [source for row in range(len(data)) for source in data.sources_of(row).tolist()]
    assert all(sources.count(source) == 2 for source in set(sources)) and len(set(sources)) == 30
    assert sorted(said for _, said in chats(config)) == sorted(
        [*(f"a{i}<|im_end|>" for i in range(30)), *["b<|im_end|>"] * 30]
    )


@pytest.mark.parametrize(
    ("reasoning", "empty", "full"),
    [
        ("mask_empty", "Hi<|im_end|>", "<think>\nhm\n</think>\n\nHi<|im_end|>"),
        ("keep", "<think>\n\n</think>\n\nHi<|im_end|>", "<think>\nhm\n</think>\n\nHi<|im_end|>"),
        ("drop", "Hi<|im_end|>", "Hi<|im_end|>"),
    ],
)
def test_loss_on_reasoning_follows_data_reasoning(reasoning: str, empty: str, full: str) -> None:
    thoughts = "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
    thoughts = "{% if m.role == 'assistant' %}" + thoughts + "{% endif %}"
    writer = writer_of(CHATML.replace("{{ m.content }}", thoughts + "{{ m.content }}"), reasoning=reasoning)
    assert learned(writer, talk(("user", "q"), ("assistant", "Hi"))) == [empty]
    assert learned(writer, talk(("user", "q"), ("assistant", "Hi"), reasoning_content="hm")) == [full]
    inside = writer_of(CHATML, reasoning=reasoning)
    assert learned(inside, talk(("user", "q"), ("assistant", "<think>\nhm\n</think>\n\nHi"))) == [full]
    # If the prompt opens the thinking, the answer has only its end.
    opens = CHATML.replace("{{ m.content }}", thoughts + "{{ m.content }}").replace(
        "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
    )
    shown = {"keep": "\n</think>\n\nHi<|im_end|>"}.get(reasoning, "Hi<|im_end|>")
    assert learned(writer_of(opens, reasoning=reasoning), talk(("user", "q"), ("assistant", "Hi"))) == [shown]


CALL = {"function": {"name": "f", "arguments": {"x": "y", "n": 1}}}
RICH = {
    "messages": [
        {"role": "user", "content": "q", "name": "Ann"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "content": "found"},
        {"role": "assistant", "content": "a"},
    ],
    "tools": [TOOL],
}
HIDING = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")


@pytest.mark.parametrize(
    ("template", "lost"),
    [
        (CHATML, ["name", "reasoning_content", "tool_calls.arguments", "tool_calls.name", "tools"]),
        (CALLING, ["name", "reasoning_content", "tool_calls.name", "tools"]),
        (
            HIDING,
            ["name", "reasoning_content", "tool results", "tool_calls.arguments", "tool_calls.name", "tools"],
        ),
    ],
)
def test_fields_left_out_by_a_template_are_found(template: str, lost: list[str]) -> None:
    writer, chat = writer_of(template), read_chat(RICH)
    assert writer.left_out(chat, writer.examples(chat)) == lost


@pytest.mark.parametrize("inside", [False, True])
def test_reasoning_of_earlier_answers_may_be_left_out(inside: bool) -> None:
    """Templates leave it out in the prompts of the model, too. Only that of learned answers must be there."""
    says = (
        "{% set parts = m.content.split('</think>') %}{% if m.role == 'assistant' and loop.last %}<think>\n"
    )
    says += "{{ m.reasoning_content or parts[0].replace('<think>', '').strip() }}\n</think>\n\n{% endif %}"
    template = CHATML.replace("{{ m.content }}", says + "{{ parts[-1].strip() }}")
    thoughts: list[dict[str, Any]] = [
        {"content": f"<think>\n{text}\n</think>\n\na"} if inside else {"reasoning_content": text}
        for text in ("oh", "hm")
    ]
    turns = talk(("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "a"))["messages"]
    row = {
        "messages": [turns[0], turns[1] | thoughts[0] | {"train": False}, turns[2], turns[3] | thoughts[1]]
    }
    writer, chat = writer_of(template), read_chat(row)
    assert learned(writer, row) == ["<think>\nhm\n</think>\n\na<|im_end|>"]
    assert writer.left_out(chat, writer.examples(chat)) == []


def test_rows_with_fields_left_out_are_counted_or_rejected(tmp_path: Path) -> None:
    rows = [
        messages_of(1, "plain"),
        *(talk(("user", f"q{i}"), ("assistant", "a"), thinking="t") for i in range(9)),
    ]
    write_jsonl(tmp_path / "a.jsonl", rows)
    with refused("left-out-by-template"):
        prepared(tmp_path, **options(CHATML))
    config = data_config(tmp_path, **options(CHATML, strict=False, dir=str(tmp_path / "other")))
    assert any("left out by the template: thinking in 9 rows" in line for line in run(config))
    manifest = train_set(config).manifest
    assert manifest.sources[0]["fields_left_out"] == {"thinking": 9} and manifest.documents == 10
    prepared(tmp_path, **options(CHATML, reasoning="drop", dir=str(tmp_path / "dropped")))
    for row in rows:
        row["messages"][-1].pop("thinking", None)
        row["messages"][0] |= {"timestamp": "noon", "name": "Ann"}  # templates need not write these
    write_jsonl(tmp_path / "a.jsonl", rows)
    told = run(data_config(tmp_path, **options(CHATML, dir=str(tmp_path / "named"))))
    assert any("left out by the template: name in 10 rows, timestamp in 10 rows" in line for line in told)


def test_chats_are_compared_by_their_written_text(tmp_path: Path) -> None:
    """Rows that differ only in ids and keys without tokens are duplicates, so that none is held out."""
    rows = []
    for i in range(100):
        row = messages_of(1, "tools")
        row["messages"][1]["tool_calls"][0]["id"] = row["messages"][2]["tool_call_id"] = f"call_{i}"
        for message in row["messages"]:
            message["id"] = f"message {i}"
        rows.append(row)
    rows += [talk(("user", f"q{i}"), ("assistant", "a")) for i in range(60)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    calling = TOOLS.replace("{{ c.function", "{{ c.function.name }}{{ c.function")
    config = prepared(tmp_path, **options(calling, validation_fraction=0.3, sequence_len=1000))
    assert train_set(config).manifest.rejected == {"duplicate": 99}


def test_a_table_gives_the_same_tokens_as_json_lines(tmp_path: Path) -> None:
    """Tables add the keys of all calls to each call as null, which are ignored. An Arrow map is an object."""
    arguments: list[dict[str, Any]] = [{"town": "Oslo"}, {"a": "x", "b": 2.5}, {"deep": {"c": "d"}}]
    rows = []
    for i in range(12):
        row = messages_of(1, "tools")
        row["messages"][0]["content"] += str(i)
        row["messages"][1]["tool_calls"][0]["function"]["arguments"] = arguments[i % 3]
        row["tools"][0] = json.loads(json.dumps(TOOL))
        row["tools"][0]["function"]["parameters"]["properties"] = {f"p{i % 3}": {"type": "string"}}
        rows.append(row)
    write_jsonl(tmp_path / "a.jsonl", rows)
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    results = []
    for ending in ("jsonl", "parquet"):
        sources = [{"files": f"a.{ending}"}]
        config = prepared(
            tmp_path, **options(TOOLS, sources=sources, strict=False, dir=str(tmp_path / ending))
        )
        results.append(chats(config))
    assert results[0] == results[1] and "null" not in str(results)
    pairs = pa.array([[("town", "Oslo")]], pa.map_(pa.string(), pa.string()))
    call = pa.StructArray.from_arrays([pa.array(["f"]), pairs], ["name", "arguments"])
    pyarrow.parquet.write_table(pa.table({"call": call}), tmp_path / "map.parquet")
    from emo.data_prep.sources.inputs import open_inputs

    (opened,) = open_inputs(data_config(tmp_path, sources=[{"files": "map.parquet"}]))
    (piece,) = opened.pieces()
    assert piece.payload == [{"call": {"name": "f", "arguments": {"town": "Oslo"}}}]


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_a_tokenizer_without_tokenizer_json_can_have_a_template(tmp_path: Path, kind: str) -> None:
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    if kind == "bytes":
        from tokenizers.pre_tokenizers import ByteLevel

        vocab = {char: i for i, char in enumerate([*sorted(ByteLevel.alphabet()), "<|endoftext|>"])}
        (directory / "vocab.json").write_text(json.dumps(vocab))
        (directory / "merges.txt").write_text("#version: 0.2\n")
    else:
        (directory / "tokenizer.model").write_bytes((tiny_tokenizer() / "model/tokenizer.model").read_bytes())
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    asks = "{% if add_generation_prompt %}assistant: {% endif %}"
    (directory / "chat_template.jinja").write_text(template + asks)
    write_jsonl(tmp_path / "a.jsonl", [talk(("user", f"q{i}"), ("assistant", "a")) for i in range(20)])
    config = data_config(tmp_path, **options(CHATML, tokenizer=str(directory)))
    run(config)
    assert "already prepared" in "".join(run(config)) and len(chats(config)) == 20
    (directory / "chat_template.jinja").write_text("Hello" + template + asks)
    with refused("tokenizer-changed"):
        run(config)


def test_a_base_model_gets_a_template_by_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [talk(("user", f"q{i}"), ("assistant", "a")) for i in range(20)])
    config = prepared(tmp_path, **options(CHATML, template="chatml"))
    assert chats(config)[0][0].endswith("assistant\na<|im_end|>")
    saved = json.loads((config.dir / "tokenizer/tokenizer_config.json").read_text())
    assert "<|im_start|>" in saved["chat_template"] and "already prepared" in "".join(run(config))
    assert train_set(config).manifest.template == "chatml/1" and not verify(config.dir)[1]
    with refused("template-tokens"):
        prepared(tmp_path, **options(CHATML, template="llama3", dir=str(tmp_path / "other")))


def without_prefix_after_specials(directory: Path) -> str:
    """Save a tokenizer like Mistral's, which begins only a text with a space. Return its directory."""
    save_tokenizer(tiny_tokenizer(), None, directory)
    tree = json.loads((directory / "tokenizer.json").read_text())
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    (directory / "tokenizer.json").write_text(json.dumps(tree | {"normalizer": None, "pre_tokenizer": space}))
    (directory / "tokenizer.model").unlink()
    return str(directory)


@pytest.mark.parametrize("template", ["alpaca", "chat"])
@pytest.mark.parametrize("kind", ["pieces", "other pieces", "trained"])
def test_servers_get_a_chat_template_that_equals_a_plain_template(
    tmp_path: Path, template: str, kind: str
) -> None:
    """The ids are those of prepared rows, by transformers' own rendering of the saved tokenizer."""
    row = messages_of(2, "system")
    write_jsonl(tmp_path / "a.jsonl", [row] * 2)
    source: dict[str, Any] = {"tokenizer": str(tiny_tokenizer())}
    if kind == "other pieces":
        source = {"tokenizer": without_prefix_after_specials(tmp_path / "tokenizer")}
    elif kind == "trained":
        source = {"tokenizer": None, "train_tokenizer": 300}
    config = data_config(tmp_path, kind="instruct", template=template, sequence_len=512, **source)
    assert not any("chat template" in line for line in run(config))
    ((ids, labels),) = segments(train_set(config))
    served = AutoTokenizer.from_pretrained(config.dir / "tokenizer")
    for message in (2, 4):
        prompt = served.apply_chat_template(row["messages"][:message], add_generation_prompt=True)
        count = len(prompt["input_ids"])
        assert ids[:count] == prompt["input_ids"] and labels[count - 2] < 0 <= labels[count - 1]
    alone = served.apply_chat_template(row["messages"][1:2], tokenize=False, add_generation_prompt=True)
    (turn,) = render(Conversation((Exchange("Question 0?", ""),)), template)
    assert alone.removeprefix("<s>").lstrip(" ") == turn.text


@pytest.mark.parametrize("is_same", [True, False])
def test_a_chat_template_that_is_not_used_is_reported_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_same: bool
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [talk(("user", f"q{i}"), ("assistant", "a")) for i in range(20)])
    config = data_config(tmp_path, **options(CHATML, template="alpaca"))
    if not is_same:
        monkeypatch.setattr("emo.data_prep.shards.served_template.as_jinja", lambda *_: CHATML)
    notes = [line for line in run(config) if "chat template" in line]
    assert "has a chat template, but data.template=alpaca" in notes[0] and len(notes) == 2 - is_same
    saved = json.loads((config.dir / "tokenizer/tokenizer_config.json").read_text())
    assert ("### Response:" in saved["chat_template"]) if is_same else ("chat_template" not in saved)
    assert "already prepared" in "".join(run(config))


def test_template_variables_reach_the_template_and_the_settings(tmp_path: Path) -> None:
    template = "{% if mood is defined %}{{ mood }}{% endif %}" + CHATML
    write_jsonl(tmp_path / "a.jsonl", [talk(("user", f"q{i}"), ("assistant", "a")) for i in range(20)])
    config = prepared(tmp_path, **options(template, template_variables={"mood": "calm"}))
    assert all(text.startswith("calm<|im_start|>") for text, _ in chats(config))
    with refused("settings-differ"):
        prepared(tmp_path, **options(template, template_variables={"mood": "wild"}))
    for wrong in ({"messages": []}, {"date": "tomorrow"}):
        with pytest.raises(UserError):
            data_config(tmp_path, **options(template, template_variables=wrong))


def test_a_row_may_set_variables_of_the_template(tmp_path: Path) -> None:
    """As in TRL, the column chat_template_kwargs has priority over data.template_variables."""
    template = "{{ mood }}{% if loud %}!{% endif %}" + CHATML
    values: list[Any] = [None, {"mood": "wild", "loud": None}, '{"loud": true}', {}]
    turns = talk(("user", "q"), ("assistant", "a"))
    write_jsonl(tmp_path / "a.jsonl", [turns | {"chat_template_kwargs": value} for value in values])
    config = prepared(tmp_path, **options(template, template_variables={"mood": "calm"}, shards=1))
    assert [text.partition("<")[0] for text, _ in chats(config)] == ["calm!", "calm", "wild"]
    assert not verify(config.dir)[1]
    write_jsonl(tmp_path / "a.jsonl", [turns | {"chat_template_kwargs": "loud"}])
    with pytest.raises(UserError, match="chat_template_kwargs must be an object"):
        prepared(tmp_path, **options(template, dir=str(tmp_path / "other")))


def test_turns_that_end_with_the_next_role_token_are_learned(tmp_path: Path) -> None:
    """As in GLM's template, the token that begins the next turn ends each answer, also the last one."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|im_end|>' }}{{ m.content }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_end|>{% endif %}"
    )
    turns = [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]
    writer = writer_of(template)
    assert len(writer.examples(read_chat(talk(*turns)))) == 1
    assert learned(writer, talk(*turns)) == ["a<|im_start|>", "b<|im_start|>"]
    write_jsonl(tmp_path / "a.jsonl", [talk(*turns, ("user", f"{i}"), ("assistant", "c")) for i in range(20)])
    config = prepared(tmp_path, **options(template))
    saved = Tokenizer.from_file(str(config.dir / "tokenizer/tokenizer.json"))
    assert train_set(config).manifest.answer_ends == [saved.token_to_id("<|im_start|>")]
    assert Plan.load(config.dir / "plan.parquet").summary["rejected"] == {}


def test_a_mark_on_the_end_token_alone_belongs_to_its_answer() -> None:
    mark = "{% generation %}{{ m.content }}{% endgeneration %}{% generation %}<|im_end|>{% endgeneration %}"
    part = "{% if m.role == 'assistant' %}" + mark + "{% else %}{{ m.content }}<|im_end|>{% endif %}"
    writer = writer_of(CHATML.replace("{{ m.content }}<|im_end|>", part))
    turns = [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]
    assert learned(writer, talk(*turns)) == ["a<|im_end|>", "b<|im_end|>"]


def test_a_system_message_that_is_dropped_after_the_prompt_is_kept_in_every_example() -> None:
    """The form of a chat without system message, which is one example, is not remembered for one with it."""
    writer = writer_of(MISTRAL)
    calling = messages_of(1, "tools")["messages"]
    system = {"role": "system", "content": "Be brief."}
    assert len(writer.examples(read_chat({"messages": calling}))) == 1
    chat = read_chat({"messages": [system, *calling]})
    call, answer = writer.examples(chat)
    assert call.text.startswith("<s>[INST]Be brief.\n\nQuestion 0?[/INST][TOOL_CALLS]")
    assert answer.text.startswith("<s>[INST]Question 0?[/INST][TOOL_CALLS]")  # as in generation
    assert "system" not in writer.left_out(chat, [call, answer])
    for turns in (1, 2):
        chat = read_chat(messages_of(turns, "system"))
        examples = writer.examples(chat)
        assert [text.count("[INST]Be brief.\n\n") for text, _ in examples] == [1] * turns
        assert examples[-1].text.endswith(f"Question {turns - 1}?[/INST] Answer {turns - 1}.</s>")
        assert writer.left_out(chat, examples) == []


def test_an_answer_whose_end_is_not_marked_has_no_end_token() -> None:
    """Otherwise generation would stop at the last token of a content before the first call."""
    content = "{% generation %}{{ m.content }}{% endgeneration %}"
    marked = "{% if m.role == 'assistant' %}" + content + "{% else %}{{ m.content }}{% endif %}"
    saved = tokenizer_with(CALLING.replace("{{ m.content or '' }}", marked))
    call = talk(("user", "q"), ("assistant", "I look."), tool_calls=[CALL])
    encoder = ChatEncoder(saved, read_template(saved, "t"))
    assert learned(encoder.writer, call) == ["I look."]
    ((_, spans, ends),) = encoder.encode(read_chat(call))
    assert len(spans) == 1 and ends == []
    ((ids, _, ends),) = encoder.encode(read_chat(talk(("user", "q"), ("assistant", "a"))))
    assert ends == ids[-1:]  # <|im_end|>, which follows the mark


ADDING = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m['content'] + '' }}{% for c in m.tool_calls or [] %}{"arguments": {{ c.function.arguments | tojson }}}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501


@pytest.mark.parametrize("content", [None, ...])
def test_the_form_of_calls_does_not_depend_on_earlier_rows(content: Any) -> None:
    """The arguments of a call stay objects, whether its content is empty, null or missing."""
    writer = writer_of(ADDING)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"town": "Oslo"}}}]}
    other = call | ({} if content is ... else {"content": content})
    for said in (call | {"content": ""}, other, call | {"content": ""}):
        row = {"messages": [{"role": "user", "content": "q"}, said]}
        assert learned(writer, row) == ['{"arguments": {"town": "Oslo"}}<|im_end|>']


def test_special_tokens_in_text_are_counted(tmp_path: Path) -> None:
    """They are characters there, because a text that mentions them must not end a turn."""
    rows = [{"text": f"{i} <|im_start|>user" if i % 3 else f"{i} < |im_start"} for i in range(90)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    config = data_config(tmp_path, tokenizer=str(tokenizer_with(CHATML)))
    assert any("60 documents with special tokens" in line for line in run(config))


@needs_trl
@pytest.mark.parametrize("thought", [{"reasoning_content": ""}, {"thinking": " \n"}, {}])
def test_empty_reasoning_has_no_loss(thought: dict[str, str]) -> None:
    writer = ChatWriter(read_template(stand_in("gptoss")[1], "gptoss"))
    content = "a" if thought else "<think>\n\n</think>\n\na"
    row = talk(("user", "q"), ("assistant", content), **thought)
    assert learned(writer, row) == ["<|channel|>final<|message|>a<|return|>"]


def test_a_developer_message_becomes_a_system_message_if_the_template_lacks_it() -> None:
    template = "{# for a developer #}" + CHATML.replace(
        "{% for m in messages %}", "{% for m in messages if m.role in ('system', 'user', 'assistant') %}"
    )
    chat = read_chat(talk(("developer", "Be brief."), ("user", "q"), ("assistant", "a")))
    writer = writer_of(template)
    ((text, _),) = writer.examples(chat)
    assert "<|im_start|>system\nBe brief." in text and not writer.left_out(chat, writer.examples(chat))


def test_variables_may_be_days_and_must_be_read(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [talk(("user", f"q{i}"), ("assistant", "a")) for i in range(20)])
    dated = "{{ day }}{{ strftime_now('%Y-%m-%d') }}" + CHATML
    days = {"date": datetime.date(2026, 1, 31), "day": datetime.date(2026, 2, 1)}  # as YAML reads them
    config = prepared(tmp_path, **options(dated, template_variables=days))
    assert all(text.startswith("2026-02-012026-01-31") for text, _ in chats(config))
    with refused("template-variable"):
        prepared(tmp_path, **options(dated, template_variables={"dya": 1}, dir=str(tmp_path / "other")))
    with refused("bad-value"):
        data_config(tmp_path, **options(dated, template_variables={"day": math.nan}))
    with refused("bad-value"):
        data_config(tmp_path, **options(dated, template="chat", reasoning="drop"))
