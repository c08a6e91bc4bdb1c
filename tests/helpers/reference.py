"""Generate the configuration reference from the recipe's models: python -m tests.helpers.reference

It writes docs/reference/recipe.md with a table of every key, and docs/recipe.schema.json for editors.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from itertools import pairwise
from typing import Any, get_args

from emo.common.config.recipe import FREE, Section
from emo.pipeline.config import RunConfig
from tests.conftest import REPO

PAGE = REPO / "docs" / "reference" / "recipe.md"
SCHEMA = REPO / "docs" / "recipe.schema.json"
HEADER = """# Recipe reference

A recipe is a YAML file with the keys below. `make reference` generates this page and
[the JSON schema](../recipe.schema.json). Begin a recipe with this line, and an editor with YAML support
completes and checks its keys:

```yaml
# yaml-language-server: $schema=docs/recipe.schema.json
```

`emo train RECIPE train.seed=7` sets a key on the command line. With `extends: other.yaml` a recipe only needs
the keys that differ. A run that resumes may change only the keys marked *Free*.
"""
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def sections(cls: type[Section]) -> dict[str, type[Section]]:
    """Return a section and the sections below it by class name."""
    results = {cls.__name__: cls}
    pending = [field.annotation for field in cls.model_fields.values()]
    while pending:
        annotation = pending.pop()
        if isinstance(annotation, type) and issubclass(annotation, Section):
            results |= sections(annotation)
        pending += get_args(annotation)
    return results


def meanings(cls: type[Section]) -> dict[str, str]:
    """Return the text below each field of a section, inherited fields included, from the source."""
    texts: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if issubclass(base, Section) and base is not Section]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        texts |= {
            field.target.id: inspect.cleandoc(text.value.value)
            for field, text in pairwise(body)
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
        }
    return texts


def schema() -> dict[str, Any]:
    tree = RunConfig.model_json_schema()
    for name, cls in sections(RunConfig).items():
        properties = (tree if cls is RunConfig else tree["$defs"][name])["properties"]
        for key, meaning in meanings(cls).items() if name != "RampConfig" else ():
            properties[key]["description"] = meaning
    tree["properties"]["extends"] = {
        "type": "string",
        "description": "Another recipe, whose keys this one completes or replaces: a file in the same "
        "directory or launch/recipes/NAME.yaml. `{}` removes the keys of a section.",
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **tree, "title": "EMO recipe"}


def type_of(field: dict[str, Any]) -> str:
    """Return a field's type as text, such as `integer > 0`, `a | b`, `list of Source` or `map of number`."""
    if "enum" in field:
        return " \\| ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field:
        return " or ".join(type_of(part) for part in field["anyOf"] if part.get("type") != "null")
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    limits = ", ".join(
        f"{sign} {int(field[key]):,}" if field[key] >= 1000 else f"{sign} {field[key]:g}"
        for key, sign in LIMITS.items()
        if key in field
    )
    kind = "path" if field.get("format") == "path" else field.get("type", "anything")
    if kind == "array":
        inner = field.get("items") or field.get("prefixItems", [{}])[0]
        kind = f"list of {type_of(inner)}"
    elif kind == "object" and isinstance(field.get("additionalProperties"), dict):
        kind = f"map of {type_of(field['additionalProperties'])}"
    return f"{kind} {limits}".strip()


def table(title: str, section: dict[str, Any]) -> list[str]:
    lines = [f"## {title}", "", section.get("description", "").split("\n\n")[0].replace("\n", " "), ""]
    lines += ["|key|type|default|meaning|", "|---|---|---|---|"]
    for name, field in section["properties"].items():
        meaning = field["description"].replace("\n", " ").replace("|", "\\|")
        default = field.get("default")
        if isinstance(default, dict) and default:
            default = None  # a section has a table with its defaults
        cell = "" if default is None else f"`{json.dumps(default)}`"
        cell = "required" if name in section.get("required", ()) else cell
        free = " *Free.*" if field.get("mark") == FREE else ""
        lines.append(f"|`{name}`|{type_of(field)}|{cell}|{meaning}{free}|")
    return [*lines, ""]


def page() -> str:
    tree = schema()
    sections = {"Recipe": tree, **tree["$defs"]}
    lines = [line for title, section in sections.items() for line in table(title, section)]
    return "\n".join([HEADER, *lines])


def schema_text() -> str:
    tree = schema()
    for section in (tree, *tree["$defs"].values()):
        section.pop("required", None)  # an extended recipe may set them
    return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    SCHEMA.write_text(schema_text(), encoding="utf-8")
