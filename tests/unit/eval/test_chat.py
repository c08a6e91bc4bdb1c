"""emo chat: prompts as in training, the history, a full context, and the end of a turn."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from emo.common.errors import ExitCode
from emo.common.text import printable
from emo.data_prep.encoding.chat_templates import read_template
from emo.data_prep.encoding.chats import ChatEncoder
from emo.data_prep.encoding.templates import Chat, Conversation, Exchange
from emo.data_prep.encoding.tokenizer import save_tokenizer
from emo.data_prep.shards.encode import EncodeSettings, RowEncoder
from emo.eval.generation.sampling import Sampler
from emo.eval.judging.answers import Exchanged, Question, conversation_ids
from emo.eval.models.model import EvaluatedModel
from tests.helpers.evaluating import command, load, tiny_model
from tests.helpers.said import lines

TEMPLATE = (
    "{{ bos_token }}{% if mode is defined %}{{ mode }}{% endif %}{% for m in messages %}"
    "{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_model(tmp_path_factory.mktemp("chat") / "tuned", 3, max_position_embeddings=256)
    model, tokenizer = load(directory)
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    with torch.no_grad():  # no bytes, because an incomplete character is shown differently later
        model.lm_head.weight[[i for i, piece in enumerate(pieces) if piece.startswith("<0x")]] = 0
    model.save_pretrained(directory)
    (directory / "export.json").write_text(json.dumps({"template": "chat/1"}))
    return directory


def talk(
    monkeypatch: pytest.MonkeyPatch, model: Path, messages: list[str], *options: object
) -> tuple[str, list[str]]:
    """Return what `chat --greedy` prints for these messages, and all notes except the first."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{message}\n" for message in messages)))
    code, out, err = command("chat", "--model", model, "--greedy", "--max_new_tokens", 6, *options)
    assert code == 0, err
    return out, lines(err)[1:]


def templated(model: Path, directory: Path, text: str, **facts: Any) -> EvaluatedModel:
    """Return a copy of a model with this chat template and this record of its training."""
    shutil.copytree(model, directory)
    (directory / "chat_template.jinja").write_text(text)
    (directory / "export.json").write_text(json.dumps(facts))
    return EvaluatedModel(str(directory))


@pytest.mark.parametrize(("turns", "system"), [(3, "Be brief."), (1, "")])
@pytest.mark.parametrize("question", [Question("", "Why?"), Question("", "Why?", "It is.")])
@pytest.mark.parametrize("template", ["alpaca", "chat", "chat_template"])
def test_a_conversation_is_encoded_as_in_training(
    tuned: Path, tmp_path: Path, template: str, question: Question, turns: int, system: str
) -> None:
    """The ids before the last answer equal those in the prepared example."""
    model = templated(tuned, tmp_path / "model", TEMPLATE)
    earlier = Exchange("Who <s> sat?", "A cat."), Exchange("Where? </s>", "On a mat.")
    exchanges = (*earlier, Exchange(question.instruction, "So.", question.input))[-turns:]
    facts = save_tokenizer(tuned, None, tmp_path)
    if template == "chat_template":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
        messages = [{"role": "system", "content": system}] if system else []
        for exchange in (*exchanges[:-1], Exchange(question.text, "So.")):
            messages.append({"role": "user", "content": exchange.prompt})
            messages.append({"role": "assistant", "content": exchange.response})
        chat = Chat(json.dumps(messages))
        ((row, spans, _),) = ChatEncoder(tmp_path, read_template(tmp_path, "it")).encode(chat)
    else:
        rows = RowEncoder(EncodeSettings(tmp_path, facts, template, 512, "drop", None))
        encoded = rows.conversations([Conversation(exchanges, system)])
        row, spans = encoded.ids.tolist(), encoded.spans[0].tolist()
    history = [
        Exchanged(Question("", exchange.prompt), list(row[start:end]), exchange.response)
        for exchange, (start, end, _) in zip(exchanges[:-1], spans[:-1], strict=True)
    ]
    for said in (history, [e._replace(ids=e.ids[:-1]) for e in history]):  # also if a reply was cut off
        ids = conversation_ids(model, template, said, question, system)
        assert ids == list(row[: int(spans[-1][0])])


def naive(model: EvaluatedModel, ids: list[int], tokens: int = 6) -> tuple[list[int], str]:
    """Return the most likely continuation as ids, including the end token, and as text."""
    new: list[int] = []
    while len(new) < tokens and (not new or new[-1] not in model.ends):
        with torch.no_grad():
            new.append(int(model.model(torch.tensor([ids + new])).logits[0, -1].argmax()))
    written = [token for token in new if token not in model.ends]
    before, whole = (model.tokenizer.decode(part, skip_special_tokens=True) for part in (ids, ids + written))
    return new, whole[len(before) :].lstrip()


def test_replies_equal_greedy_decoding(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected, history = EvaluatedModel(str(tuned)), [], []
    for message in ("Who sat?", "Where?"):
        ids = conversation_ids(model, "chat", history, Question("", message), "Be brief.")
        new, text = naive(model, ids)
        history.append(Exchanged(Question("", message), new, text))
        expected.append(text)
    messages = ["Who sat?", "", "Where?", "/reset", "Who sat?"]
    out, notes = talk(monkeypatch, tuned, messages, "--system", "Be brief.")
    assert out == printable("".join(f"{text}\n" for text in [*expected, expected[0]]))
    assert len(notes) == 1  # about the reset


def test_every_token_is_printed_as_soon_as_it_is_chosen(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[int]] = []
    run = Sampler.run

    def watched(self: Sampler, *arguments: Any) -> Any:
        show = self.on_tokens
        assert show is not None
        self.on_tokens = lambda tokens: (batches.append(tokens), show(tokens))
        return run(self, *arguments)

    monkeypatch.setattr(Sampler, "run", watched)
    talk(monkeypatch, tuned, ["Who sat?"])
    model = EvaluatedModel(str(tuned))
    new, _ = naive(model, conversation_ids(model, "chat", [], Question("", "Who sat?")))
    assert batches == [[token] for token in new]


def test_a_full_context_drops_the_oldest_exchange(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that alone exceeds the context is skipped, and the conversation continues."""
    model = EvaluatedModel(str(tuned))
    messages = [f"the cat sat on mat {i} " * 5 for i in range(5)]
    out, notes = talk(monkeypatch, tuned, [*messages, "why " * 300, "Why?"])
    assert ["oldest" in note for note in notes[-2:]] == [True, False] and len(notes) == 6
    history = []
    for message in messages[:2]:
        question = Question("", message.strip())
        new, text = naive(model, conversation_ids(model, "chat", history, question))
        history.append(Exchanged(question, new, text))
    assert out.startswith(printable("".join(f"{text}\n" for _, _, text in history)))


def test_a_template_gets_the_variables_of_its_training(tuned: Path, tmp_path: Path) -> None:
    """`strftime_now` gives the same day as in training, also without tokenizer.json."""
    dated = TEMPLATE + "{{ strftime_now('%d %B %Y') }}"
    days: dict[str, Any] = {"01 January 2026": {"mode": "calm"}, "03 February 2025": {"date": "2025-02-03"}}
    for day, variables in days.items():
        model = templated(
            tuned, tmp_path / day, dated, template="chat_template/2", template_variables=variables
        )
        if "mode" in variables:
            (model.path / "tokenizer.json").unlink()
            shutil.copy(tuned.parent / "tokenizer" / "tokenizer.model", model.path)
        text = model.tokenizer.decode(conversation_ids(model, "chat_template", [], Question("", "Why?")))
        assert text.endswith(day) and ("calm" in text) is ("mode" in variables)


def test_earlier_reasoning_is_a_separate_field() -> None:
    """The reasoning may be opened in the reply or in the prompt."""
    for text in ("<think>\nhm\n</think>\n\nYes.", "hm</think>Yes."):
        message = Exchanged(Question("", "Why?"), [], text).message
        assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
    assert Exchanged(Question("", "Why?"), [], " So").message == {"role": "assistant", "content": " So"}


def test_chat_rejects_a_model_without_a_template(tuned: Path, tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", tokenizer=EvaluatedModel(str(tuned)).tokenizer)
    code, out, err = command("chat", "--model", base)
    assert (code, out) == (ExitCode.MISTAKE, "") and len(lines(err)) == 1 and "emo generate" in err


def test_generate_points_to_chat_for_a_tuned_model(tuned: Path, tmp_path: Path) -> None:
    """The hint is printed on stderr only, because stdout has the texts."""
    for name, said in (("tuned", True), ("base", False)):
        path = tuned if said else tiny_model(tmp_path / name, tokenizer=EvaluatedModel(str(tuned)).tokenizer)
        options = (
            "--prefix",
            "the cat",
            "--samples",
            1,
            "--max_new_tokens",
            2,
            "--output_path",
            tmp_path / "out",
        )
        code, out, err = command("generate", "--model", path, *options)
        assert code == 0 and "emo chat" not in out
        assert [("emo chat" in line and "chat/1" in line) for line in lines(err)] == [True] * said
