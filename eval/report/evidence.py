"""The report's sections on single rows and texts, and on how results were made."""

from __future__ import annotations

from typing import Any

from common.page.figures import css_colour
from common.page.parts import Markup, chip, definitions, details, join, row, section, table, tag
from eval.report.gather import Report
from eval.report.numbers import DASH
from eval.results import Model

SAMPLES_SHOWN = 4
CONFUSION_LABELS = 8  # larger matrices are in results.json only
UNITS = {
    "openicl_ppl": "nats per token of the whole prompt",
    "suffix_sum": "nats of the label",
    "suffix_mean": "nats per token of the label",
    "channel": "nats of the text, given the label",
    "calibrated": "nats of the label, less those without the text",
}
# Condition -> how the settings' table calls it.
SETTINGS = {
    "prompt_version": "Prompts",
    "shots": "Shots",
    "retriever": "Retriever",
    "score": "Score",
    "inferencer": "Inferencer",
    "faithful": "Faithful",
    "max_tokens": "Longest prompt",
    "dtype": "Dtype",
    "scorer": "Scorer",
}

DATA = "Data and prompts"
COLUMNS = ("Rows", *SETTINGS.values(), DATA)


def samples(report: Report) -> Markup:
    """The first sampled texts of each model."""
    cards = []
    for number, model in enumerate(report.everyone):
        quotes = [
            tag("blockquote", tag("i", s["prefix"]), s["text"], "" if s["ended"] else " …")
            for s in model.samples[:SAMPLES_SHOWN]
        ]
        if quotes:
            cards.append(tag("div", tag("h3", chip(css_colour(number)), model.name), *quotes))
    text = (
        "Sampled without truncation (top-k 0, top-p 1, temperature 1); the first of each model, none picked."
    )
    if not cards:
        return Markup()
    return section("What the models write", tag("p", text), tag("div", *cards, class_="cards"))


def confusions(report: Report) -> Markup:
    """A matrix per task and model, folded by task."""
    blocks = []
    for task in report.tasks:
        tables = [
            _confusion(number, model.name, model.results[task])
            for number, model in enumerate(report.models)
            if task in model.results and len(model.results[task]["labels"]) <= CONFUSION_LABELS
        ]
        if tables:
            blocks.append(details(report.of_task(task)["title"], tag("div", *tables, class_="confusions")))
    if not blocks:
        return Markup()
    text = "Rows: the right label. Columns: the prediction. Shading: share of the row."
    return section("Confusion", tag("p", text), *blocks)


def _confusion(number: int, model: str, result: dict[str, Any]) -> Markup:
    labels = result["labels"]
    head = tag("tr", tag("th"), *(tag("th", label, title=label) for label in labels))
    body = []
    for label, counts in zip(labels, result["confusion"], strict=True):
        total = max(sum(counts), 1)
        shaded = [tag("td", f"{n:,}", style=f"--v:{n / total:.3f}") for n in counts]
        body.append(tag("tr", tag("th", label, title=label), *shaded))
    parts = (tag("caption", model), tag("thead", head), tag("tbody", *body))
    return tag(
        "div", tag("table", *parts, class_="confusion", style=f"--c:{css_colour(number)}"), class_="scroll"
    )


def worst(report: Report) -> Markup:
    """The wrong answers whose right label lost by most."""
    blocks = []
    for task in report.tasks:
        for number, model in enumerate(report.models):
            result = model.results.get(task, {})
            shown = [_mistake(sample, result["score"]) for sample in result.get("worst", [])]
            if shown:
                title = join(chip(css_colour(number)), f"{result['title']} · {model.name}")
                blocks.append(details(title, *shown))
    if not blocks:
        return Markup()
    text = (
        "For each task and model the wrong answers whose right label lost by most, with the demonstrations "
        "the model saw (most similar first) and the score of every label; the smallest wins. Rows are "
        "numbered as in the data, from 0."
    )
    return section("Worst mistakes", tag("p", text), *blocks)


def _mistake(sample: dict[str, Any], score: str) -> Markup:
    gold, predicted = sample["gold"], sample["prediction"]
    kinds = {gold: "up", predicted: "down"}
    roles = {gold: "right answer", predicted: "model's answer"}
    rows = [
        tag(
            "tr",
            tag("td", label, class_=f"text {kinds.get(label, '')}".strip()),
            tag("td", f"{value:.4f}"),
            tag("td", roles.get(label, ""), class_="text quiet"),
        )
        for label, value in sorted(sample["scores"].items(), key=lambda item: item[1])
    ]
    head = tag("tr", tag("th", "Label", class_="text"), tag("th", UNITS[score]), tag("th"))
    scores = tag("table", tag("thead", head), tag("tbody", *rows))
    shown = [tag("li", d["text"], " ", tag("b", d["label"])) for d in sample["demonstrations"]]
    demonstrations = join(tag("h4", "Demonstrations"), tag("ol", *shown)) if shown else ""
    return tag(
        "div",
        tag("h4", f"Data row {sample['id']}: {gold}, answered {predicted}"),
        tag("pre", sample["text"]),
        tag("div", scores, class_="scroll"),
        demonstrations,
        class_="sample",
    )


def settings(report: Report) -> Markup:
    """How each task was asked; models in one row were asked alike. What is alike everywhere is said once."""
    asked: list[tuple[str, str, dict[str, str]]] = []
    for task in report.tasks:
        kinds: dict[tuple[str, ...], list[str]] = {}
        for model in report.models:
            if task in model.results:
                kinds.setdefault(tuple(_conditions(model, task).values()), []).append(model.name)
        for i, (values, names) in enumerate(kinds.items()):
            who = "all" if len(kinds) == 1 else ", ".join(names)
            title = "" if i else report.of_task(task)["title"]
            asked.append((title, who, dict(zip(COLUMNS, values, strict=True))))
    if not asked:
        return Markup()
    alike = [name for name in COLUMNS if len({values[name] for _, _, values in asked}) == 1]
    shown = [name for name in COLUMNS if name not in alike]
    rows = [
        row([title, who, *(values[n] for n in shown)], text=len(shown) + 2) for title, who, values in asked
    ]
    caption = "Results of a task can be compared where all of this is equal."
    if alike:
        everywhere = "; ".join(f"{name.lower()}: {asked[0][2][name]}" for name in alike)
        caption += f" Alike everywhere: {everywhere}."
    if DATA in shown:
        caption += (
            f" {DATA}: digests of test rows, of the rows that demonstrations come from, and of prompts."
        )
    return section("Settings", table(["Task", "Models", *shown], rows, caption, text=len(shown) + 2))


def _conditions(model: Model, task: str) -> dict[str, str]:
    """COLUMNS of the settings' table for one result."""
    result = model.results[task]
    found = result["conditions"]["noted"] | result["conditions"]["compared"]
    shown = {"Rows": f"{result['n']:,}"}
    for name, title in SETTINGS.items():
        value = found.get(name)
        words = {None: "the model's context" if name == "max_tokens" else DASH, True: "yes", False: "no"}
        shown[title] = words[value] if value is None or isinstance(value, bool) else str(value)
    digests = (str(found.get(name) or DASH)[:6] for name in ("test_rows", "pool_rows", "prompt"))
    return shown | {DATA: " ".join(digests)}


def made_with(report: Report) -> Markup:
    """Where models and numbers come from, and what could not be read."""
    items: list[tuple[str, str]] = []
    for number, model in enumerate(report.everyone):
        facts = "; ".join(f"{k} {v:,}" if type(v) is int else f"{k} {v}" for k, v in model.facts.items())
        where = f"{model.description['path']}; weights {model.description['weights'][:16]}"
        items.append((join(chip(css_colour(number)), model.name), f"{where}{'; ' + facts if facts else ''}"))
    items += [(key, str(value)) for key, value in report.metadata.items()]
    skipped = ""
    if report.skipped:
        listed = [tag("li", line) for line in report.skipped]
        skipped = join(tag("h3", "Files that could not be read"), tag("ul", *listed, class_="plain"))
    return section("Made with", definitions(items), skipped)
