"""Tests that the documentation of the configuration agrees with its classes."""

import re
from pathlib import Path

import jsonschema
import pytest
from make_config_reference import OTHER_NAMES, PAGE, other_names, page

from mcore_rl.cli.train import PROGRAMS
from mcore_rl.config import build_config, read_yaml
from mcore_rl.config.schema import as_list, as_text, json_schema, reference_of, section_of
from mcore_rl.errors import UserError

EXPLAINED_BY_THEIR_SECTION = {"dpo", "kto", "loss", "distillation", "vllm"}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_every_key_has_a_sentence(program):
    sections = reference_of(program.config)
    bare = [f"{section.name}.{key.name}" for section in sections for key in section.keys if not key.meaning]
    assert not [name for name in bare if name.rpartition(".")[2] not in EXPLAINED_BY_THEIR_SECTION]
    assert all(section.meaning for section in sections if section.name)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_every_key_is_there(program):
    fields = set(program.config.model_fields)
    sections = reference_of(program.config)
    outside = {key.name for key in sections[0].keys}
    assert outside | {section.name for section in sections if section.name and "." not in section.name} == fields


def test_every_heading_of_the_page_has_its_own_anchor():
    headings = re.findall(r"^#+ (.*)$", page(), re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings]
    assert len(set(anchors)) == len(anchors), sorted(name for name in anchors if anchors.count(name) > 1)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_help_names_every_key_once(program):
    sections = reference_of(program.config)
    text = " ".join(" ".join(line.split()) for line in as_list(sections))
    parts = re.split(r"(?:^| )([\w.]+|\(none\)): ", text)[1:]
    listed = [f"{name}.{key}" for name, keys in zip(parts[::2], parts[1::2], strict=True) for key in keys.split(", ")]
    assert len(set(listed)) == len(listed)
    named = {f"{section.name or '(none)'}.{key.name}" for section in sections for key in section.keys}
    assert set(listed) == named - {section.name for section in sections}


def test_the_page_is_as_written():
    assert PAGE.read_text() == page(), "run scripts/make_config_reference.py"
    assert OTHER_NAMES.read_text() == other_names(), "run scripts/make_config_reference.py"


def test_a_section_that_is_not():
    with pytest.raises(UserError, match=r"--help los: no such section; sections are model, model.fp8, model.lora, "):
        section_of(PROGRAMS["grpo"].config, "los")
    lines = list(as_text([section_of(PROGRAMS["grpo"].config, "grpo")]))
    assert "  num_prompts_per_step: integer = 16" in lines
    assert "  top_p: number = 1.0" in lines


CONFIGS = sorted((PAGE.parent.parent / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_schema_takes_what_the_program_takes(path: Path):
    schema = json_schema(PROGRAMS[path.name.split("_")[0]].config)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate({"base": "other.yaml", **read_yaml(path)}, schema)


def test_the_schema_takes_variables():
    values = {"seed": "${SEED}", "optimizer": {"lr": "${LR:-1e-4}", "schedule": "${SCHEDULE}"}, "base": "b.yaml"}
    jsonschema.validate(values, json_schema(PROGRAMS["dpo"].config))


def test_the_schema_takes_null_for_a_section_with_a_default():
    values = {"loss": None, "environment": None, "generation": {"vllm": None}, "model": {"lora": None}}
    jsonschema.validate(values, json_schema(PROGRAMS["grpo"].config))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", None),
        ("optimizer", {"lr": 2}),
        ("optimizer", {"lrr": 1e-3}),
        ("seed", 1.5),
        ("batch", {"global_batch_size": 0}),
    ],
)
def test_the_schema_refuses_what_the_program_refuses(key, value):
    config = PROGRAMS["dpo"].config
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({key: value}, json_schema(config))
    with pytest.raises(UserError, match=key):
        build_config(config, {key: value}, [], "")


def test_the_schema_explains():
    schema = json_schema(PROGRAMS["dpo"].config)
    assert schema["$defs"]["OptimizerConfig"]["properties"]["clip_grad"]["description"].startswith("Maximum norm")
    assert schema["$defs"]["DPOAlgorithmConfig"]["properties"]["reference"]["description"].startswith(
        "When the reference"
    )
