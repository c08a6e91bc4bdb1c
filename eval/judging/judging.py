"""The judges, and their replies to all pairs in both orders: by a model here, or elsewhere, by files.

A model on this machine replies in chunks that processes share. For a judge elsewhere, prompts are written to
a file, and its replies read back; no key of any service is needed here.

    {"id": ID, "prompt": TEXT}                     --export FILE; replies: {"id", "reply": TEXT, "model"}
    {"custom_id": ID, "method", "url", "body"}     --export FILE --format openai; replies: its batch output

ID is DIGEST-ROW-ORDER: replies to other pairs, or to another judge's prompts, are refused.

Replies are read by the rules of the judge's own code. A parser takes any text and gives a verdict, "a" being
the answer that the prompt shows first, or None: the reply is unreadable. Replies are data: they are searched
and read as literals, never run.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from emo.common.errors import UserError
from emo.data_prep.encoding.tokenizer import chat_template, text_ids

from ..generation.decoding import Beams, Decoding, Request
from ..generation.engines import Record, Reply, TextJob, Transformers
from ..generation.prefixes import Row, read_rows
from ..results import store
from .answers import Question, chat_ids, require_once, shortened
from .pairs import EXCHANGED, Judged, Pair, Pairs, Side, row_of

PROMPTS: dict[str, str] = yaml.safe_load((Path(__file__).parent / "prompts.yaml").read_text(encoding="utf-8"))
# What PandaLM's code takes out of responses, and out of its model's replies.
SPECIAL = re.compile(
    r"<unk>|<pad>|<s>|</s>|\[PAD\]|<\|endoftext\|>|\[UNK\]|\[CLS\]|\[MASK\]"
    r"|<\|startofpiece\|>|<\|endofpiece\|>|\[gMASK\]|\[sMASK\]"
)
LONGEST = 100_000  # characters of a reply that are read as a literal; a verdict of AlpacaEval has about 80

VERDICTS: dict[str, Side] = {"1": "a", "2": "b", "tie": "tie"}


def auto_j_prompt(question: Question, first: str, second: str) -> str:
    """Return Auto-J's pairwise prompt. An input follows its instruction, as in AlpacaEval's questions."""
    prompt = _filled("auto_j", prompt=question.text, response=first, response_another=second)
    return _filled("auto_j_frame", input=prompt)


def auto_j_verdict(reply: str) -> Side | None:
    """Return what follows the last "final decision is "; extract_pariwise_result of GAIR-NLP/auto-j."""
    _, marker, decision = reply.strip().rpartition("final decision is ")
    verdict = re.match("response 1|response 2|tie", decision.strip().lower()) if marker else None
    return VERDICTS[verdict.group().removeprefix("response ")] if verdict else None


def pandalm_prompt(question: Question, first: str, second: str) -> str:
    """Return PandaLM's prompt; special tokens in the responses are left out."""
    texts = {"instruction": question.instruction, "input": question.input}
    texts |= {"response1": _without_special(first), "response2": _without_special(second)}
    return _filled("pandalm_input" if question.input else "pandalm", **texts)


def pandalm_verdict(reply: str) -> Side | None:
    """Return what the first line says; parse_pandalm_response of WeOpenML/PandaLM, where others are ties."""
    return VERDICTS.get(_without_special(reply).split("\n")[0].lower())


def alpaca_eval_prompt(question: Question, first: str, second: str) -> str:
    """Return the prompt of the annotator alpaca_eval_gpt4, in ChatML."""
    return _filled("alpaca_eval", instruction=question.text, output_1=first, output_2=second)


def alpaca_eval_verdict(reply: str) -> Side | None:
    """Return the rank of model_1 in a Python list of dictionaries; ranking_parser of alpaca_eval 0.6.6."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a literal may look odd to Python
            ranked: Any = ast.literal_eval(reply if len(reply) <= LONGEST else "")
        (rank, *_) = [entry["rank"] for entry in ranked if entry["model"] == "model_1"]
        return {1: "a", 2: "b"}.get(rank)  # type: ignore[return-value]
    except Exception:  # whatever a text can do to a parser: it is no verdict
        return None


def messages(chatml: str) -> list[dict[str, str]]:
    """Return the messages that AlpacaEval makes of its prompt; answers may hold the marks of ChatML."""
    system, _, user = chatml.partition("<|im_start|>user\n")
    instruction = system.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n")
    request = user.removesuffix("<|im_end|>")
    return [{"role": "system", "content": instruction.strip()}, {"role": "user", "content": request.strip()}]


def _without_special(text: str) -> str:
    return SPECIAL.sub("", text.strip()).strip()


def _filled(name: str, **texts: str) -> str:
    """Return a prompt with its {slots} filled in, in one pass: texts may contain braces, even {slots}."""
    return re.sub(r"\{(\w+)\}", lambda match: texts[match.group(1)], PROMPTS[name])


@dataclass(frozen=True)
class Judge:
    """model: its own weights, which a run may replace; None: they are not public. chat: the prompt is ChatML.

    prompt: (question, first answer, second answer) -> text. tokens: the longest reply.
    """

    name: str
    model: str | None
    prompt: Callable[[Question, str, str], str]
    verdict: Callable[[str], Side | None]
    decoding: Decoding | Beams
    tokens: int
    chat: bool = False
    remote: str = ""  # what a batch file asks for


GREEDY = Decoding(greedy=True)
JUDGES = {
    judge.name: judge
    for judge in (
        Judge("auto-j", "GAIR/autoj-13b", auto_j_prompt, auto_j_verdict, GREEDY, 1024),
        Judge("pandalm", "WeOpenML/PandaLM-7B-v1", pandalm_prompt, pandalm_verdict, Beams(4, 1.2), 512),
        Judge("alpaca_eval", None, alpaca_eval_prompt, alpaca_eval_verdict, GREEDY, 100, True, "gpt-4"),
    )
}


def shown(judge: Judge, pair: Pair, swapped: bool, characters: int | None = None) -> str:
    """Return the prompt of a pair; swapped: B's answer first; characters: as many of either at most."""
    first, second = (pair.b, pair.a) if swapped else (pair.a, pair.b)
    return judge.prompt(pair.question, first[:characters], second[:characters])


def of_replies(
    judge: Judge, by: str, pairs: Pairs, replies: Sequence[Record], facts: dict[str, Any]
) -> Judged:
    """Return pairs with the replies to their prompts.

    replies: one per pair, {"replies": [{"text", ...}, {"text", ...}]}, A's answer first and B's first; with
    "unasked" instead where there was nothing to ask, and "cut" where both answers were cut.
    """
    rows = []
    for pair, reply in zip(pairs.rows, replies, strict=True):
        sides = [judge.verdict(r["text"]) for r in reply["replies"]]
        sides[1:] = map(EXCHANGED.get, sides[1:])
        if reply["unasked"] == IDENTICAL:
            sides = ["tie"] * 2  # as AlpacaEval's annotator has it
        rows.append(row_of(pair, sides) | {key: reply[key] for key in ("replies", "unasked", "cut")})
    return Judged(judge.name, by, pairs.a, pairs.b, 2, rows, facts, pairs.questions)


VERSION = 2  # of everything that decides what a reply is
IDENTICAL, NO_ROOM = "identical", "no_room"  # why a pair was not asked


class Judging(TextJob):
    """Asks a judge about pairs in the engine's model."""

    chunk, unit, per_row = 32, "reply", 2

    def __init__(
        self, judge: Judge, pairs: Pairs, engine: Transformers, out: Path, tokens: int | None = None
    ) -> None:
        super().__init__(engine, judge.tokens if tokens is None else tokens, out)
        self.judge, self.pairs = judge, pairs
        self.template = chat_template(self.model.path) if judge.chat else None
        if self.context is not None and self.tokens >= self.context:
            raise UserError(
                f"{self.model.given} has a context of {self.context} tokens, and replies may take "
                f"{self.tokens}; set --max_new_tokens lower"
            )

    def run(self) -> list[Record]:
        """Return the rows that `of_replies` takes: replies to all pairs, made or read."""
        pairs = self.pairs.rows
        if all(pair.a == pair.b for pair in pairs):  # a model beside itself: no weights are loaded
            return [self.record(self.prepare(row)[0], []) for row in range(len(pairs))]
        chat = None if self.template is None else store.digest(self.template)
        decides = {"judging": VERSION, "judge": self.judge.name, "pairs": self.pairs.digest, "chat": chat}
        decides |= {"tokens": self.tokens, "context": self.context} | self.engine.identity
        label = f"{self.judge.name}: {self.pairs.b} against {self.pairs.a}"
        rows = self.complete(decides, len(pairs), label)
        if {row["unasked"] for row in rows} in ({NO_ROOM}, {NO_ROOM, IDENTICAL}):
            raise UserError(
                f"no prompt fits into the {self.context} tokens of {self.model.given} beside a reply of "
                f"{self.tokens}; set --max_new_tokens lower, or take a judge with a longer context"
            )
        return rows

    def prepare(self, row: int) -> tuple[Record, list[Request]]:
        """Return why a pair is not asked, or the characters that both answers are cut to, and its prompts."""
        pair = self.pairs.rows[row]
        if pair.a == pair.b:
            return {"unasked": IDENTICAL, "cut": None}, []
        cut, ids = None, self._fitting(pair, None)
        if ids is None:
            cut, too_long, ids = 0, max(len(pair.a), len(pair.b)), self._fitting(pair, 0)
            if ids is None:
                return {"unasked": NO_ROOM, "cut": None}, []
            while too_long - cut > 1:
                middle = (cut + too_long) // 2
                if longer := self._fitting(pair, middle):
                    cut, ids = middle, longer
                else:
                    too_long = middle
        return {"unasked": None, "cut": cut}, [Request(part, [row, order]) for order, part in enumerate(ids)]

    def record(self, facts: Record, replies: list[Reply]) -> Record:
        """Return a pair's replies."""
        return facts | {"replies": [reply for _, reply in replies]}

    def _fitting(self, pair: Pair, characters: int | None) -> list[list[int]] | None:
        """Return the ids of the prompts in both orders, if there is room for them and the replies."""
        prompts = [shown(self.judge, pair, swapped, characters) for swapped in (False, True)]
        if self.template is None:
            ids = [text_ids(self.model.tokenizer, prompt) for prompt in prompts]
        else:
            ids = [chat_ids(self.model, messages(prompt)) for prompt in prompts]
        fits = self.context is None or max(map(len, ids)) + self.tokens <= self.context
        return ids if fits else None


FORMATS = ("jsonl", "openai")


def write_prompts(
    judge: Judge, pairs: Pairs, file: Path, form: str, model: str | None, tokens: int | None
) -> int:
    """Write the prompts of all pairs in both orders; how many. model, tokens: what `openai` asks for."""
    if form not in FORMATS:
        raise UserError(f"--format {form!r} is not known; known: {', '.join(FORMATS)}")
    if form == "openai" and isinstance(judge.decoding, Beams):
        raise UserError(f"--format openai: {judge.name} decodes with beams, which batch files cannot ask for")
    if file.is_dir():
        raise UserError(f"--export {file} is a directory; give a file")
    kind = "chat/completions" if judge.chat else "completions"
    lines = []
    for pair, ids in zip(pairs.rows, _ids(judge, pairs), strict=True):
        for swapped, name in enumerate(ids):
            prompt = shown(judge, pair, bool(swapped))
            line: Record = {"id": name, "prompt": prompt}
            if form == "openai":
                body: Record = {"model": model or judge.remote or judge.model}
                body |= {"messages": messages(prompt)} if judge.chat else {"prompt": prompt}
                body |= {"max_tokens": tokens or judge.tokens, "temperature": 0}
                line = {"custom_id": name, "method": "POST", "url": f"/v1/{kind}", "body": body}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    store.replace(file, "".join(lines))
    return len(lines)


def _ids(judge: Judge, pairs: Pairs) -> list[list[str]]:
    """Return the ids of each pair's prompts, A's answer first, then B's; none where the answers are alike."""
    digest = store.digest([judge.name, pairs.digest])[:12]
    orders = [("ab", "ba") if pair.a != pair.b else () for pair in pairs.rows]
    return [[f"{digest}-{row}-{order}" for order in part] for row, part in enumerate(orders)]


def read_replies(judge: Judge, pairs: Pairs, file: Path, asked: str | None) -> tuple[list[Record], str]:
    """Return the replies to `write_prompts`, for `of_replies`, and the model that wrote them.

    asked: the model that they should be of (--ask_for), or None. UserError for a half-written file, and for
    replies that are missing, given twice, to other prompts, or whose model is mixed, unknown or another one.
    A reply whose request failed is empty, hence unreadable: {"text": "", "failed": true}.
    """
    of_pairs = _ids(judge, pairs)
    expected = dict.fromkeys(name for names in of_pairs for name in names)
    rows = read_rows(file) if expected else []  # nothing was asked where all pairs have the same answer twice
    ids = [str(row.get("custom_id", row.get("id"))) for row in rows]
    require_once(ids, f"{file}: replies come")
    foreign = [name for name in ids if name not in expected]
    absent = sorted(expected.keys() - ids)
    if foreign or absent:
        raise UserError(
            f"{file}: {len(absent)} of {len(expected)} replies are missing, {len(foreign)} are not to these "
            f"prompts: {shortened([*foreign, *absent])}; give the --judge, answers and options of --export",
            code="foreign" if foreign else "missing",
        )
    replies = dict(zip(ids, map(_reply, rows), strict=True))
    if replies and all("failed" in reply for reply in replies.values()):
        raise UserError(
            f"{file}: no reply arrived: {len(replies)} of {len(replies)} requests failed; ask again",
            code="all-failed",
        )
    records: list[Record] = [
        {"unasked": None if ids else IDENTICAL, "cut": None, "replies": [replies[name] for name in ids]}
        for ids in of_pairs
    ]
    if not replies:
        return records, asked or judge.remote or judge.model or judge.name
    return records, _author(file, [reply for reply in replies.values() if "failed" not in reply], asked)


# What services add to the name that was asked for: the date of the version that replied.
SNAPSHOT = re.compile(r"-(\d{4}|\d{6}|\d{8}|\d{4}-\d{2}-\d{2})(-preview)?")


def _author(file: Path, replies: Sequence[Record], asked: str | None) -> str:
    """Return the model that wrote all replies: the one that they name, else the one asked for."""
    named = Counter(reply.get("model") or "" for reply in replies)
    models = sorted(named.keys() - {""})
    if len(named) > 1:
        counts = ", ".join(f"{name or 'no model named'} ({count})" for name, count in named.most_common())
        raise UserError(
            f"{file}: replies of several models: {counts}; give one file of each judge", code="mixed-judges"
        )
    if not models and asked is None:
        raise UserError(
            f'{file} does not name the model that wrote the replies; add "model" to its rows, or set '
            "--ask_for MODEL",
            code="unnamed-judge",
        )
    if models and asked is not None:
        short, other = (name.rpartition("/")[2].lower() for name in (asked, models[0]))
        if not other.startswith(short) or (other != short and not SNAPSHOT.fullmatch(other[len(short) :])):
            raise UserError(
                f"{file}: replies by {models[0]}, but --ask_for names {asked}; set --ask_for {models[0]}",
                code="other-judge",
            )
    return models[0] if models else str(asked)


def _reply(row: Row) -> Record:
    """Return the reply in a row of either form; its text is "" where it is null. model: who wrote it."""
    if isinstance(row.get("reply", 0), str | None):
        return {"text": row["reply"] or ""} | _model_of(row, row.source)
    if "response" not in row and "error" not in row:
        raise UserError(
            f'{row.source}: it must be {{"id", "reply": TEXT}}, or a line of a batch\'s output',
            code="no-reply",
        )
    failed = {"text": "", "failed": True}
    if row.get("error"):
        return failed
    try:
        body = row["response"]["body"]
        choice = body["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    except (KeyError, IndexError, TypeError):
        return failed
    reply = {"text": text if isinstance(text, str) else "", "ended": choice.get("finish_reason") != "length"}
    return reply | _model_of(body, row.source)


def _model_of(fields: dict[str, Any], source: str) -> Record:
    """Return {"model": NAME}, or {} where no model is named; UserError where it is not a text."""
    name = fields.get("model")
    if not isinstance(name, str | None):
        raise UserError(f'{source}: "model" must be the name of a model, not {name!r}', code="judge-name")
    return {"model": name} if name else {}
