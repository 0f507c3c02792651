"""The keys of a configuration as text: for `--help`, for the reference page, and as a JSON schema for editors."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
import types
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from mcore_rl.config.load import BASE
from mcore_rl.errors import UserError


@dataclass(frozen=True)
class Key:
    """A key of a section.

    default: default value as YAML text; "" if the key is required.
    """

    name: str
    kind: str
    default: str
    meaning: str


@dataclass(frozen=True)
class SectionReference:
    """A section and its keys. The section with the name "" has the keys that are outside of all sections."""

    name: str
    meaning: str
    keys: tuple[Key, ...]


def reference_of(config: type[BaseModel]) -> list[SectionReference]:
    """Return all sections of a configuration. A section inside another one has the name `outer.inner`."""
    return list(_sections("", config))


def section_of(config: type[BaseModel], name: str) -> SectionReference:
    """Return the section with this name.

    Raises:
        UserError: there is no such section.
    """
    sections = {section.name: section for section in reference_of(config)}
    if name not in sections:
        known = ", ".join(filter(None, sections))
        raise UserError(f"--help {name}: no such section; sections are {known}")
    return sections[name]


def as_list(sections: list[SectionReference]) -> Iterator[str]:
    """Yield lines for a terminal with the names of all keys, each once. A section inside another has its own line."""
    inner = {section.name for section in sections}
    for section in sections:
        names = dict.fromkeys(key.name for key in section.keys if f"{section.name}.{key.name}" not in inner)
        line = f"{section.name or '(none)'}: {', '.join(names)}"
        yield textwrap.fill(line, 110, initial_indent="  ", subsequent_indent="      ")


def as_markdown(sections: list[SectionReference], programs: str = "", repeated: Container[str] = ()) -> Iterator[str]:
    """Yield the lines of a Markdown page with one table per section.

    Args:
        programs: names of the programs that have these sections; headings of the sections `repeated` include them.
    """
    for section in sections:
        of_programs = f" of {programs}" if section.name in repeated else ""
        yield f"## `{section.name}`{of_programs}" if section.name else "## Outside of sections"
        yield ""
        if section.meaning:
            yield section.meaning
            yield ""
        yield "| key | kind | default | meaning |"
        yield "|---|---|---|---|"
        for key in section.keys:
            cells = (f"`{key.name}`", key.kind, f"`{key.default}`" if key.default else "required", key.meaning)
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""


def as_text(sections: list[SectionReference]) -> Iterator[str]:
    """Yield lines for a terminal: each key, and its description below it."""
    for section in sections:
        yield f"\n{section.name or 'outside of sections'}: {section.meaning}"
        for key in section.keys:
            yield f"  {key.name}: {key.kind} = {key.default}" if key.default else f"  {key.name}: {key.kind}, required"
            if key.meaning:
                yield textwrap.fill(key.meaning, 110, initial_indent="      ", subsequent_indent="      ")


def section_classes(config: Any) -> Iterator[Any]:
    """Yield the class of a configuration and the classes of all its sections."""
    yield config
    for annotation, _ in _fields(config).values():
        for section in forms_of_section(annotation):
            yield from section_classes(section)


def _sections(name: str, cls: Any) -> Iterator[SectionReference]:
    keys, inner = [], []
    meanings = meanings_of(cls)
    for key, (annotation, default) in _fields(cls).items():
        forms = forms_of_section(annotation)
        path = f"{name}.{key}" if name else key
        if forms:
            inner.append((path, forms))
        if not forms or name:
            keys.append(Key(key, _kind(annotation), default, meanings.get(key, "")))
    yield SectionReference(name, meaning_of_section(cls), tuple(keys))
    for path, forms in inner:
        yield from _sections(path, forms[0]) if len(forms) == 1 else [_joined_forms(path, forms)]


def _joined_forms(name: str, forms: list[Any]) -> SectionReference:
    """Describe a section whose keys depend on its key `name`; `forms` has one class for each value of that key.

    The result has the keys of all forms. If only some forms have a key, its description begins with their names.
    """
    base = next(cls for cls in inspect.getmro(forms[0]) if all(issubclass(form, cls) for form in forms))
    found: dict[tuple[str, str, str], list[str]] = {}
    for form in forms:
        own = meanings_of(form)
        for key, (annotation, default) in _fields(form).items():
            if key not in _fields(base):
                meaning = own.get(key, "")
                found.setdefault((key, _kind(annotation), meaning), []).append(
                    f"{default} ({_fields(form)['name'][1]})"
                )
    shared = [
        Key(key, _kind(annotation), default, meanings_of(base).get(key, ""))
        for key, (annotation, default) in _fields(base).items()
    ]
    own_keys = [_of_forms(*described, defaults) for described, defaults in found.items()]
    return SectionReference(name, meaning_of_section(base), (*shared, *own_keys))


def _of_forms(key: str, kind: str, meaning: str, defaults: list[str]) -> Key:
    """Return the description of a key that only some forms of a section have (see `_joined_forms`).

    Args:
        defaults: for each of these forms, the text `DEFAULT (FORM)`.
    """
    values = {text.rpartition(" (")[0] for text in defaults}
    names = ", ".join(text.rpartition(" (")[2].removesuffix(")") for text in defaults)
    return Key(key, kind, values.pop() if len(values) == 1 else ", ".join(defaults), f"{names}: {meaning}")


def _fields(cls: Any) -> dict[str, tuple[Any, str]]:
    """Return the annotation and the default of each field of a pydantic model or a dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    if dataclasses.is_dataclass(cls):
        return {field.name: (hints[field.name], _default(field.default)) for field in dataclasses.fields(cls)}
    return {name: (hints[name], _default(field.default)) for name, field in cls.model_fields.items()}


def _default(value: Any) -> str:
    if value is PydanticUndefined or value is dataclasses.MISSING:
        return ""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | dict):
        return str(list(value)) if isinstance(value, tuple) else str(value)
    return "see its own keys" if isinstance(value, BaseModel) or dataclasses.is_dataclass(value) else str(value)


def forms_of_section(annotation: Any) -> list[Any]:
    """Return the classes of all forms of the section that `annotation` describes; [] if it describes no section."""
    if inspect.isclass(annotation) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)):
        return [annotation]
    parts = get_args(annotation)[: 1 if hasattr(annotation, "__metadata__") else None]
    return [form for part in parts for form in forms_of_section(part)]


def _kind(annotation: Any) -> str:
    """Return a readable name of an annotation: `text | null`, `number`, `swap | precompute`."""
    names = {str: "text", int: "integer", float: "number", bool: "true | false", type(None): "null", Any: "any"}
    if annotation in names:
        return names[annotation]
    if hasattr(annotation, "__metadata__"):  # Annotated
        return _kind(annotation.__origin__)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " | ".join(map(_kind, arguments))
    if origin in (tuple, list):
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        key, value = map(_kind, arguments)
        return f"{key}: ({value})" if ": " in value else f"{key}: {value}"
    return "section" if forms_of_section(annotation) else {"Path": "path"}.get(annotation.__name__, annotation.__name__)


@functools.cache
def meanings_of(cls: Any) -> dict[str, str]:
    """Return the description of each field of the class and its base classes: the string below the field."""
    found: dict[str, str] = {}
    for base in reversed(inspect.getmro(cls)):
        if not base.__module__.startswith("mcore_rl"):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                    found[name] = _joined(meaning)
    return found


def meaning_of_section(cls: Any) -> str:
    """Return the first paragraph of the docstring of a section's class, which may be inherited from a base class."""
    for base in inspect.getmro(cls):
        text = base.__dict__.get("__doc__") or ""
        if base.__module__.startswith("mcore_rl") and text and not text.startswith(f"{base.__name__}("):
            return _joined(inspect.cleandoc(text).partition("\n\n")[0])
    return ""


def _joined(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


VARIABLE = {"type": "string", "pattern": r"\$\{"}
"""JSON schema of a text with an environment variable `${…}`. Such a text may replace, for example, a number."""


def json_schema(config: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a program's files.

    No key is required, because an included file or the command line may set it.
    """
    schema = config.model_json_schema()
    for cls in section_classes(config):
        definition = schema if cls is config else schema["$defs"][cls.__name__]
        definition.pop("required", None)
        definition["description"] = meaning_of_section(cls)
        for name, meaning in meanings_of(cls).items():
            if name in definition["properties"]:
                definition["properties"][name]["description"] = meaning
        for name, kind in definition["properties"].items():
            if "oneOf" in kind:  # forms of a section; the name that chooses one may be in another file
                kind["anyOf"] = kind.pop("oneOf")
            elif "$ref" in kind and "default" in kind:
                kind["anyOf"] = [{"$ref": kind.pop("$ref")}]
            elif {"enum", "anyOf", "const"} & set(kind) or kind.get("type") in ("number", "integer", "boolean"):
                outer = {key: kind.pop(key) for key in ("title", "description", "default") if key in kind}
                definition["properties"][name] = {**outer, "anyOf": [kind, VARIABLE]}
            if "default" in kind and any("$ref" in form for form in kind.get("anyOf", ())):
                kind["anyOf"].append({"type": "null"})  # a section that is null has its default
    schema["properties"][BASE] = {"type": "string", "description": "A file that this file includes."}
    return schema
