"""The JSON schema of a configuration file, by which editors complete and check it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from mcore_rl.config.files import BASE
from mcore_rl.config.reference import meaning_of_section, meanings_of, section_classes

VARIABLE = {"type": "string", "pattern": r"\$\{"}
"""A value that the environment gives, whatever it is."""


def json_schema(config: type[BaseModel]) -> dict[str, Any]:
    """Of the files that a program takes. Nothing is required: it may stand in a base, or on the command line."""
    schema = config.model_json_schema()
    for cls in section_classes(config):
        definition = schema if cls is config else schema["$defs"][cls.__name__]
        definition.pop("required", None)
        definition["description"] = meaning_of_section(cls)
        for name, meaning in meanings_of(cls).items():
            if name in definition["properties"]:
                definition["properties"][name]["description"] = meaning
        for name, kind in definition["properties"].items():
            if {"enum", "anyOf"} & set(kind) or kind.get("type") in ("number", "integer", "boolean"):
                outer = {key: kind.pop(key) for key in ("title", "description", "default") if key in kind}
                definition["properties"][name] = {**outer, "anyOf": [kind, VARIABLE]}
    schema["properties"][BASE] = {"type": "string", "description": "A file that this one builds on."}
    return schema
