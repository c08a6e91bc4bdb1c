"""TRL's chat templates and one like Mistral's, stand-in tokenizers for them, and their expected examples."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from emo.data_prep.encoding.chat_templates import EMPTY_THINKING, RefusedError, read_template
from emo.data_prep.encoding.chat_writer import ChatWriter
from emo.data_prep.encoding.chats import ChatEncoder
from emo.data_prep.encoding.templates import Chat
from emo.data_prep.encoding.tokenizer import save_tokenizer
from emo.data_prep.sources.rows import JudgedRow, judge_rows
from emo.data_prep.sources.spec import Rejected, RowSpec
from tests.helpers.chat_templates import MISTRAL
from tests.helpers.corpus import lasting_directory

BAR, LINE = "\uff5c", "\u2581"  # in the special tokens of DeepSeek
TAG = re.compile(rf"<\|?[A-Za-z_|/{BAR}{LINE}][\w|/{BAR}{LINE}:.]*\|?>|\[/?[A-Z_]+\]|\[gMASK\]")
PLAIN_TAGS = re.compile(r"</?(think|tool|tools|arg|function|parameter|IMPORTANT|name|desc|required|type)")
# Prefix of a template's name -> the tokens that end an answer and a message with tool calls.
ENDS = {
    "cohere2": ("<|END_OF_TURN_TOKEN|>",) * 2,
    "cohere": ("<|END_OF_TURN_TOKEN|>",) * 2,
    "deepseek": (f"<{BAR}end{LINE}of{LINE}sentence{BAR}>",) * 2,
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma4_v2": ("<turn|>", "<turn|>"),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "gemma": ("<end_of_turn>",) * 2,
    "glm4": ("<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "idefics3": ("<end_of_utterance>",) * 2,
    "smolvlm": ("<end_of_utterance>",) * 2,
    "llama3": ("<|eot_id|>",) * 2,
    "llava": ("</s>",) * 2,
    "mistral": ("</s>",) * 2,
    "muse": ("<|eot|>",) * 2,
    "phi3": ("<|end|>",) * 2,
}
CHATML_END = "<|im_end|>"


def stock_templates() -> dict[str, str]:
    """Return the templates of the installed TRL and MISTRAL by name, or none without TRL."""
    found = importlib.util.find_spec("trl")
    if not found:
        return {}
    folder = Path(str(found.origin)).parent / "chat_templates"
    stock = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}
    return stock | {"mistral": MISTRAL}


def end_of(name: str, calls: bool) -> str:
    family = next((family for family in ENDS if name.startswith(family)), None)
    return CHATML_END if family is None else ENDS[family][calls]


@cache
def stand_in(name: str) -> tuple[PreTrainedTokenizerFast, Path]:
    """Return a tokenizer with the tokens that a template writes, and the directory that `prepare` saves."""
    template = stock_templates()[name]
    tags = sorted(set(TAG.findall(template)) | {end_of(name, False), end_of(name, True), "<s>"})
    if "<|return|>" in tags:
        tags.append("<|end|>")
    special = [tag for tag in tags if not PLAIN_TAGS.match(tag)]
    pair = "\u010a\u010a"  # two line breaks are one token, so an answer may change the encoding of its prompt
    vocab = {char: i for i, char in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), pair])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[(pair[0], pair[1])]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in special])
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in tags if tag not in special])
    end = end_of(name, False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|endoftext|>" if end == "<|user|>" else end
    )
    tokenizer.chat_template = template
    directory = lasting_directory()
    tokenizer.save_pretrained(directory)
    if "strftime_now" in template:
        day = "{'%Y-%m-%d': '2026-01-01', '%d %b %Y': '01 Jan 2026'}[f]"
        tokenizer.chat_template = "{%- macro strftime_now(f) -%}{{ " + day + " }}{%- endmacro -%}" + template
    save_tokenizer(directory, None, directory / "saved")
    return tokenizer, directory / "saved"


def messages_of(turns: int, kind: str) -> dict[str, Any]:
    """Return a row with this number of turns. kind: one of KINDS."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] if kind == "system" else []
    for turn in range(turns):
        answer: dict[str, Any] = {"role": "assistant", "content": f"Answer {turn}."}
        messages.append({"role": "user", "content": f"Question {turn}?"})
        if kind == "reasoning":
            answer["reasoning_content"] = answer["thinking"] = f"Because {turn}."
        elif kind == "thoughts":
            answer["content"] = f"<think>\nBecause {turn}.\n</think>\n\nAnswer {turn}."
        elif kind in CALLING_KINDS:
            call = {"id": f"call_{turn}", "type": "function"}
            call |= {"function": {"name": "weather", "arguments": {"town": f"Town {turn}"}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            if kind == "null content":
                messages[-1]["content"] = None
            elif kind == "planning":
                messages[-1]["reasoning_content"] = messages[-1]["thinking"] = f"Ask for {turn}."
            result = {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": "weather",
                "content": f"{turn} degrees",
            }
            messages.append(result)
        messages.append(answer)
    return {"messages": messages} | ({"tools": [TOOL]} if kind in CALLING_KINDS else {})


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Say the weather.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "description": "A town."}},
            "required": ["town"],
        },
    },
}
CALLING_KINDS = ("tools", "null content", "planning")
KINDS = ("plain", "system", "reasoning", "thoughts", *CALLING_KINDS)


def read_chat(row: dict[str, Any]) -> Chat:
    (judged,) = judge_rows([row], RowSpec("instruct", "auto", True, None, "none", 1_000_000, (), True))
    assert isinstance(judged, JudgedRow) and isinstance(judged.row, Chat), judged
    return judged.row


def expected(name: str, row: dict[str, Any]) -> tuple[list[list[int]], list[str]]:
    """Render every prompt. Return the ids up to the end of each answer, and its learned text."""
    tokenizer, _ = stand_in(name)
    options: dict[str, Any] = {"tools": row.get("tools"), "tokenize": False}
    messages = row["messages"]
    try:
        tokenizer.apply_chat_template(messages, **options)
    except Exception:  # some templates add text to the content of a call, even to null
        messages = [m | {"content": m["content"] or ""} for m in messages]
    if name in ("deepseekv3", "deepseek_r1_distill"):  # these templates take arguments as text
        messages = json.loads(json.dumps(messages))
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    if name.startswith(("idefics", "smolvlm", "llava")):  # these templates take content in parts
        messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
    ids, learned = [], []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True, **options)
        after = tokenizer.apply_chat_template(messages[: place + 1], **options)
        # gptoss: reasoning before a call is part of the answer. mistral: the system message is dropped
        begun = "[/INST]" if name == "mistral" else "<|start|>assistant" if name.startswith("gptoss") else ""
        if begun and not after.startswith(prompt):
            answer = after[after.rindex(begun) + len(begun) :]
        elif after.startswith(prompt.rstrip()):
            answer = after[len(prompt) if after.startswith(prompt) else len(prompt.rstrip()) :]
        else:  # DeepSeek-R1: the prompt opens the thinking, and the template omits it
            assert prompt.endswith("<think>\n"), "answers are written in another way than asked for"
            thought = message.get("reasoning_content", "")
            assert isinstance(message["content"], str)
            said = re.match(r"<think>\n(.*)\n</think>\n\n", message["content"], re.S)
            rest = after.removeprefix(prompt.removesuffix("<think>\n")).lstrip("\n")
            answer = f"{said[1] if said else thought}\n</think>\n\n{rest}"
        end = end_of(name, bool(message.get("tool_calls")))
        answer = answer[: answer.index(end) + len(end)] if end in answer else answer.rstrip() + end
        begin = tokenizer.apply_chat_template(
            messages[:place], add_generation_prompt=True, tools=options["tools"], return_dict=False
        )
        ids.append([*begin, *tokenizer.encode(answer, add_special_tokens=False)])
        empty = EMPTY_THINKING.match(answer)
        learned.append(answer[empty.end() if empty else 0 :])
    return ids, learned


def compare(name: str, row: dict[str, Any]) -> tuple[str, str]:
    """Return `equal`, `rejected` or `different`, and the details."""
    tokenizer, saved = stand_in(name)
    template = read_template(saved, name)
    chat = read_chat(row)
    try:
        encoded = ChatEncoder(saved, template).encode(chat)
        writer = ChatWriter(template)
        exact = writer.examples(chat, exact=True)
        left = writer.left_out(chat, exact)
    except RefusedError as error:
        return "rejected", error.detail
    try:
        ids, learned = expected(name, row)
    except Exception as error:
        return "different", f"the reference fails: {error}"
    assert not isinstance(left, Rejected)
    got = {
        tuple(tokens[:stop]): tokens[start:stop] for tokens, spans, _ in encoded for start, stop, _ in spans
    }
    if ChatWriter(template).examples(chat) != exact:
        return "different", "examples of signs and of every prompt differ"
    for wanted, text in zip(ids, learned, strict=True):
        if tuple(wanted) not in got:
            near = min(got, key=lambda tokens: abs(len(tokens) - len(wanted)), default=())
            return (
                "different",
                f"{tokenizer.decode(wanted)!r} is not there; {tokenizer.decode(list(near))!r} is",
            )
        marked = name.endswith("_training") and text.endswith(tokenizer.decode(got[tuple(wanted)]))
        if tokenizer.decode(got[tuple(wanted)]) != text and not marked:
            return "different", f"learned is {tokenizer.decode(got[tuple(wanted)])!r}, not {text!r}"
    if len(got) != len(ids):
        return "different", f"{len(got)} answers instead of {len(ids)}"
    return "equal", f"{len(encoded)} examples" + (f", leaves out {', '.join(left)}" if left else "")
