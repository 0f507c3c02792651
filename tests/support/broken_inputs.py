"""Files with one mistake each, and a correct model, data and configurations."""

import json
import re
import shutil

import torch
import yaml
from safetensors.torch import load_file, save_file
from small_models import make_model, make_tokenizer
from transformers import AutoTokenizer

from mcore_rl.run.identity import RunIdentity


def make_everything(root):
    make_data(root)
    make_models(root)
    make_configs(root)
    make_outputs(root)


def jsonl(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def chat(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def make_data(root):
    pairs = [{"prompt": f"say {i} ", "completion": "ab" * (1 + i % 3), "chosen": "yes", "rejected": "no", "answer": "7"}
             for i in range(5)]  # fmt: skip
    jsonl(root / "data.jsonl", *pairs)
    jsonl(root / "chat.jsonl", {"messages": chat("a", "b"), "prompt": chat("a")})
    (root / "empty.jsonl").write_text("")
    (root / "blank.jsonl").write_text("\n  \n\n")
    (root / "broken.jsonl").write_text('{"prompt": "a", "completion": "b"}\n\n{"prompt": \n')
    (root / "list.jsonl").write_text("[1, 2]\n")
    (root / "latin.jsonl").write_bytes('{"prompt": "é", "completion": "b"}\n'.encode("latin-1"))
    (root / "utf16.jsonl").write_bytes('{"prompt": "a", "completion": "b"}\n'.encode("utf-16"))
    (root / "data.csv").write_text("prompt,completion\na,b\n")
    (root / "object.json").write_text('{"data": [{"prompt": "a", "completion": "b"}]}')
    (root / "truncated.parquet").write_bytes(b"PAR1 and then nothing")
    (root / "directory.jsonl").mkdir()
    records = {
        "no_completion": {"prompt": "a", "answer": "b"},
        "null_completion": {"prompt": "a", "completion": None},
        "no_response": {"prompt": "a", "completion": ""},
        "sharegpt": {"conversations": [{"from": "human", "value": "a"}]},
        "alpaca": {"instruction": "a", "input": "", "output": "b"},
        "text": {"text": "a b c"},
        "mixed": {"prompt": "a", "completion": chat("a")},
        "number": {"prompt": 3, "completion": 4},
        "no_role": {"messages": [{"content": "a"}]},
        "from_value": {"messages": [{"from": "human", "value": "a"}]},
        "no_content": {"messages": [{"role": "user"}]},
        "image": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, *chat("a", "b")]},
        "weight": {"messages": [chat("a")[0], {"role": "assistant", "content": "b", "weight": 0.5}]},
        "user_weight": {"messages": [{**chat("a")[0], "weight": 1}, chat("a", "b")[1]]},
        "all_weights_0": {"messages": [chat("a")[0], {**chat("a", "b")[1], "weight": 0}]},
        "only_user": {"messages": chat("a")},
        "empty_answer": {"messages": chat("a", " ")},
        "messages_text": {"messages": "a"},
        "no_messages": {"messages": []},
        "bad_tools": {"messages": chat("a", "b"), "tools": "{"},
        "unused_tools": {"messages": chat("a", "b"), "tools": [{"name": "f"}]},
        "bad_call": {"messages": [chat("a")[0], {"role": "assistant", "tool_calls": [{"x": 1}]}]},
        "bad_arguments": {"messages": [chat("a")[0], {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "{"}}]}]},
        "no_rejected": {"prompt": "a", "chosen": "b"},
        "same": {"prompt": "a", "chosen": "b", "rejected": "b"},
        "no_prompt": {"chosen": "b", "rejected": "c"},
        "prompt_number": {"prompt": 5},
        "prompt_empty": {"prompt": ""},
        "prompt_null": {"prompt": None},
        "prompt_list": {"prompt": ["a"]},
        "long": {"prompt": "a" * 60, "completion": "b"},
        "no_answer": {"prompt": "a", "solution": "b"},
        "verl": {"prompt": "a", "data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "b"}},
    }  # fmt: skip
    for name, record in records.items():
        jsonl(root / f"{name}.jsonl", record, record)


def make_models(root):
    make_model("llama", root / "model", initializer_range=0.05)

    def changed(name, **config):
        shutil.copytree(root / "model", root / name)
        values = json.loads((root / name / "config.json").read_text()) | config
        (root / name / "config.json").write_text(json.dumps(values))
        return root / name

    changed("gpt2", model_type="gpt2")
    changed("unheard_of", model_type="unheard-of")
    changed("gelu", hidden_act="gelu")
    changed("five_heads", num_attention_heads=5)
    changed("wide", hidden_size=128)
    changed("short", max_position_embeddings=32, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    changed("deep", num_hidden_layers=3)
    changed("text_size", hidden_size="large")
    changed("no_heads", num_attention_heads=0, head_dim=None)
    changed("no_positions", max_position_embeddings=0)
    changed("narrow_vocabulary", vocab_size=40)
    changed("strange_rope", rope_parameters={"rope_type": "longrope", "rope_theta": 1e4})
    for name, kept in (("no_tokenizer", ()), ("no_weights", ("tokenizer",)), ("lora", ()), ("pickles", ("tokenizer",))):
        (root / name).mkdir()
        if name != "lora":
            shutil.copy2(root / "model" / "config.json", root / name)
        for file in (root / "model").glob("tokenizer*"):
            if kept:
                shutil.copy2(file, root / name)
    shutil.copy2(root / "model" / "model.safetensors", root / "no_tokenizer")
    (root / "lora" / "adapter_config.json").write_text("{}")
    adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    for name, more in (("dora", {"use_dora": True}), ("no_tensors", {}), ("other_tensors", {})):
        (root / name).mkdir()
        (root / name / "adapter_config.json").write_text(json.dumps({**adapter, **more}))
    module = "base_model.model.{}.lora_{}.weight"
    tensors = {module.format("lm_head", matrix): torch.zeros(2, 2) for matrix in "AB"}
    for layer in range(2):
        for matrix, shape in (("A", (2, 64)), ("B", (64, 2))):
            tensors[module.format(f"model.layers.{layer}.self_attn.q_proj", matrix)] = torch.zeros(shape)
    save_file(tensors, root / "other_tensors" / "adapter_model.safetensors")
    (root / "pickles" / "pytorch_model.bin").write_bytes(b"")
    (changed("broken_config") / "config.json").write_text('{"model_type": ')
    (changed("nameless_config") / "config.json").write_text('{"hidden_size": 3}')
    weights = (changed("truncated_weights") / "model.safetensors").read_bytes()
    (root / "truncated_weights" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    tensors = load_file(root / "model" / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, changed("lacks_a_tensor") / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": "missing.safetensors"}}
    save_file(tensors, changed("two_sets") / "other.safetensors")
    two_sets = {"weight_map": dict.fromkeys(tensors, "other.safetensors")}
    (root / "two_sets" / "model.safetensors.index.json").write_text(json.dumps(two_sets))
    (changed("lacks_a_file") / "model.safetensors.index.json").write_text(json.dumps(index))
    (root / "lacks_a_file" / "model.safetensors").rename(root / "lacks_a_file" / "present.safetensors")
    (changed("broken_tokenizer") / "tokenizer.json").write_text("{}")
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(changed("endless"))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    longer = AutoTokenizer.from_pretrained(root / "model")
    longer.add_tokens([f"<{i}>" for i in range(300)])
    longer.save_pretrained(changed("many_tokens"))
    tensors = load_file(root / "model" / "model.safetensors")
    del tensors["lm_head.weight"]
    judge = changed("judge", architectures=["LlamaForSequenceClassification"], num_labels=1, tie_word_embeddings=False)
    save_file({**tensors, "score.weight": torch.zeros(1, 64)}, judge / "model.safetensors", {"format": "pt"})
    (root / "no_template").mkdir()
    for file in (root / "model").iterdir():
        if file.name in ("config.json", "model.safetensors"):
            shutil.copy2(file, root / "no_template")
    tokenizer.save_pretrained(root / "no_template")


def make_configs(root):
    common = {
        "output_dir": str(root / "out" / "run"),
        "model": {"path": str(root / "model")},
        "data": {"train": str(root / "data.jsonl"), "max_sequence_length": 48},
        "optimizer": {"lr": 1e-3},
        "trainer": {"max_steps": 3},
    }
    batch = {"batch": {"global_batch_size": 2}}
    own = {
        "sft": batch,
        "dpo": batch,
        "rm": {**batch, "model": {**common["model"], "head": "reward"}},
        "grpo": {"grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_new_tokens": 8}},
        "ppo": {"ppo": {"num_prompts_per_step": 2, "max_new_tokens": 8}},
        "distill": {**batch, "distillation": {"teacher": str(root / "model"), "topk": 8}},
    }
    for name, sections in own.items():
        (root / f"{name}.yaml").write_text(yaml.safe_dump({**common, **sections}))
    text = (root / "sft.yaml").read_text()
    (root / "utf16.yaml").write_bytes(text.encode("utf-16"))
    (root / "latin.yaml").write_bytes(("# é\n" + text).encode("latin-1"))
    (root / "binary.yaml").write_bytes(bytes(range(256)))
    (root / "nul.yaml").write_bytes(b"a: \x00\n")
    (root / "open.yaml").write_text("a: [1")
    (root / "list.yaml").write_text("- a\n")
    (root / "empty.yaml").write_text("")
    (root / "twice.yaml").write_text(text + "trainer:\n  max_epochs: 1\n")
    (root / "twice_inside.yaml").write_text(text.replace("lr: 0.001", "lr: 0.001\n  lr: 0.002"))
    (root / "no_values.yaml").write_text(re.sub("model:\n.*", "model:", text))
    (root / "flat.yaml").write_text("optimizer: 3\n")


def make_outputs(root):
    (root / "a_file").write_text("x")
    (root / "mine" / "hf").mkdir(parents=True)
    (root / "mine" / "hf" / "README.md").write_text("a user's")
    (root / "logs").mkdir()
    (root / "logs" / "metrics.jsonl").write_text("{}\n")
    (root / "a_run" / "checkpoints" / "iter_0000003").mkdir(parents=True)
    (root / "a_run" / "run.json").write_text(RunIdentity("sft", {}, "", "", {}).to_json())
    (root / "a_run" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("3")
    (root / "an_ended_run" / "hf").mkdir(parents=True)
    (root / "an_ended_run" / "run.json").write_text(RunIdentity("sft", {}, "", "", {}).to_json())
    (root / "an_ended_run" / "samples.jsonl").write_text('{"step": 1, "prompt": "a", "completion": "b"}\n')
    (root / "nothing_here").mkdir()
    (root / "recording.jsonl").write_text("{}\n")
    (root / "template.jinja").write_text("{% for m in messages %}")
