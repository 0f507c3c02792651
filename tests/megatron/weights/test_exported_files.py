"""Tests of the files that an export copies from the model directory, and of those that it leaves out."""

import json
import re
from pathlib import Path

import pytest
import torch
from full_disk import no_room
from small_models import make_model
from transformers import AutoConfig, AutoTokenizer

from mcore_rl.errors import DiskFullError, UserError
from mcore_rl.models.megatron.model.hf_config import load_hf_config
from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory, write_hf_directory
from mcore_rl.models.megatron.model.lora import write_peft_directory
from mcore_rl.utils.files import remove_listed, unlisted_files
from mcore_rl.utils.model_directory import LEFT_OUT

COPIED = {
    "additional_chat_templates/tool_use.jinja": "{{ tools[0]['function']['name'] }}: {{ messages[0]['content'] }}",
    "spiece.model": "a",
    "sentencepiece.bpe.model": "b",
    "qwen.tiktoken": "c",
    "generation_config.json": "{}",
    "processor_config.json": "{}",
    "preprocessor_config.json": "{}",
    "video_preprocessor_config.json": "{}",
    "LICENSE": "free",
    "NOTICE.txt": "thanks",
    "modules.json": "[]",
    "modeling_own.py": "from .configuration_own import OwnConfig\n",
    "configuration_own.py": (
        "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'llama'\n"
    ),
}
OTHERS = (
    "README.md",
    ".gitattributes",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "consolidated.00.pth",
    "consolidated.safetensors",
    "model.gguf",
    "optimizer.pt",
    "training_args.bin",
    "trainer_state.json",
    "adapter_config.json",
    "adapter_model.bin",
    "hf_quant_config.json",
    "manifest.json",
    "original/params.json",
    "checkpoint-500/config.json",
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
def path(tmp_path):
    path = make_model("llama", tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_own.OwnConfig"}
    (path / "config.json").write_text(json.dumps(config))
    for name, text in {**COPIED, **dict.fromkeys(OTHERS, "{}")}.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    return path


def export(path, destination, **options):
    source = SafetensorsDirectory(path)
    tensors = [(name, source.read(name)) for name in sorted(source.names())]
    write_hf_directory(tensors, destination, path, load_hf_config(path), is_writer=True, **options)
    return files_of(destination)


NO_ROOM = r"{} cannot be written \(File too large, [\d,]+\.\d\d GiB free\); make room there$"


def test_export_on_a_full_disk_names_the_directory_and_leaves_nothing(path, tmp_path):
    out = tmp_path / "out"
    with no_room(), pytest.raises(DiskFullError, match=NO_ROOM.format(out)):
        export(path, out / "hf")
    settings = {"r": 2, "target_modules": ["q_proj"]}
    with no_room(), pytest.raises(DiskFullError, match=NO_ROOM.format(out)):
        write_peft_directory([("a", torch.zeros(900))], out / "adapter", path, settings, is_writer=True)
    assert not list(out.iterdir())


def files_of(directory):
    return {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}


def render(directory, tools=None):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tools=tools, tokenize=False)


def test_an_export_copies_all_files_but_those_of_the_list(path, tmp_path, monkeypatch):
    found = export(path, tmp_path / "hf")
    own = files_of(path)
    expected = (own - set(OTHERS)) | {"manifest.json", "model.safetensors.index.json"}
    assert found == expected and found >= set(COPIED)
    for name in COPIED:
        assert (tmp_path / "hf" / name).read_bytes() == (path / name).read_bytes(), name
    assert set(json.loads((tmp_path / "hf" / "manifest.json").read_text())) == found - {"manifest.json"}
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert type(AutoConfig.from_pretrained(tmp_path / "hf", trust_remote_code=True)).__name__ == "OwnConfig"
    # An export of the export has the same files.
    assert export(tmp_path / "hf", tmp_path / "again") == found


def test_templates_render_as_before_the_export(path, tmp_path):
    (path / "configuration_own.py").unlink()
    export(path, tmp_path / "hf")
    assert render(tmp_path / "hf") == render(path) != render(path, TOOLS)
    assert render(tmp_path / "hf", TOOLS) == render(path, TOOLS) == "add: hi"
    export(path, tmp_path / "replaced", chat_template="ours")
    assert render(tmp_path / "replaced") == render(tmp_path / "replaced", TOOLS) == "ours"


def test_an_adapter_has_the_base_models_files(path, tmp_path):
    settings = {"r": 1, "lora_alpha": 1.5, "lora_dropout": 0.0, "target_modules": ["q_proj"]}
    write_peft_directory([], tmp_path / "adapter", path, settings, is_writer=True)
    assert files_of(tmp_path / "adapter") >= set(COPIED)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["lora_alpha"] == 1.5


def test_an_export_with_subdirectories_is_replaced_and_removed(path, tmp_path):
    out = tmp_path / "hf"
    export(path, out)
    templates = out / "additional_chat_templates"
    assert unlisted_files(out) == []
    (templates / "own.jinja").write_text("mine")
    assert unlisted_files(out) == ["additional_chat_templates/own.jinja"]
    with pytest.raises(UserError, match=r"is not replaced, because it holds additional_chat_templates/own\.jinja"):
        export(path, out)
    (templates / "own.jinja").unlink()
    (out / "empty").mkdir()
    assert unlisted_files(out) == ["empty"]
    (out / "empty").rmdir()
    (path / "additional_chat_templates" / "tool_use.jinja").unlink()
    export(path, out)
    assert not templates.exists() and [entry.name for entry in tmp_path.glob(".hf*old*")] == []
    remove_listed(out)
    assert not out.exists()


@pytest.mark.parametrize("name", ["../mine.txt", "link/mine.txt", "{outside}/mine.txt"])
def test_a_manifest_removes_no_file_outside_its_directory(name, tmp_path):
    out, outside = tmp_path / "hf", tmp_path
    out.mkdir()
    (outside / "mine.txt").write_text("mine")
    (out / "link").symlink_to(outside)
    (out / "manifest.json").write_text(json.dumps({name.format(outside=outside): [4, ""]}))
    remove_listed(out)
    assert (outside / "mine.txt").read_text() == "mine"


def test_the_documentation_lists_all_patterns_that_are_left_out():
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    rows = dict(re.findall(r"^ *\| ([^|]+) \| (`[^|]+) \|$", text, re.MULTILINE))
    for kind, patterns in LEFT_OUT.items():
        assert tuple(re.findall(r"`([^`]+)`", rows[kind])) == patterns
