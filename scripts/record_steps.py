"""Record three steps of every algorithm under two layouts, or compare them with a recording, bit for bit.

    python scripts/record_steps.py record FILE
    python scripts/record_steps.py compare FILE

Each case runs a training program on the CPU, with the small models and the data of `make_demo_data.py` and
`make_arithmetic_data.py`. A recording has the metrics of each step, without times, and a
digest of the exported weights.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPTS = Path(__file__).parent
LAYOUTS = {
    "one": (1, []),
    "tp2": (2, ["parallel.tensor_model_parallel_size=2"]),
    "cp2": (2, ["parallel.context_parallel_size=2"]),
}
LIMIT_SECONDS = 300
JUDGE = """def judge(message_log, record):
    return (sum(map(ord, message_log[-1]["content"])) % 7) / 7
"""


def cases(demo: Path, arithmetic: Path) -> dict[str, tuple[str, list[str], list[str]]]:
    """Return the cases by name: program, settings and names of the layouts."""
    model, sums = f"model.path={demo}/model", f"model.path={arithmetic}/model"
    data = ["data.max_sequence_length=160", "batch.global_batch_size=8", "batch.tokens_per_pack=1024"]

    def demo_of(name):
        return [model, f"data.train={demo}/{name}_train.jsonl", *data]

    answers = [
        sums,
        f"data.train={arithmetic}/train.jsonl",
        "data.max_sequence_length=16",
        "batch.tokens_per_pack=1024",
    ]
    answers += ["environment.name=function", "environment.function=recorded_judge:judge"]
    answers += ["loss.reference_policy_kl_penalty=0.01"]
    grpo = [*answers, "grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "grpo.max_new_tokens=4"]
    ppo = [*answers, "ppo.num_prompts_per_step=16", "ppo.max_new_tokens=4"]
    return {
        "sft": ("sft", demo_of("sft"), ["one", "tp2"]),
        "dpo": ("dpo", demo_of("preference"), ["one", "tp2", "cp2"]),
        "dpo_padded": ("dpo", [*demo_of("preference")[:-1], "batch.packing=false"], ["tp2"]),
        "dpo_shared": ("dpo", [*demo_of("preference"), "batch.share_prefixes=true"], ["one", "tp2"]),
        "dpo_lora": ("dpo", [*demo_of("preference"), "model.lora.rank=4"], ["one", "tp2"]),
        "kto": ("kto", demo_of("unpaired"), ["one", "tp2"]),
        "rm": ("rm", demo_of("preference"), ["one", "tp2"]),
        "distill": ("distill", [*demo_of("sft"), f"distillation.teacher={demo}/model"], ["one", "tp2"]),
        "grpo": ("grpo", grpo, ["one", "tp2"]),
        "ppo": ("ppo", ppo, ["one", "tp2"]),
    }


def record() -> dict[str, dict]:
    recorded = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for name in ("demo", "arithmetic"):
            subprocess.run([sys.executable, SCRIPTS / f"make_{name}_data.py", root / name], check=True)
        (root / "recorded_judge.py").write_text(JUDGE)
        os.environ["PYTHONPATH"] = str(root)
        for name, (program, settings, layouts) in cases(root / "demo", root / "arithmetic").items():
            for layout in layouts:
                output = root / f"{name}_{layout}"
                run(program, [*settings, f"output_dir={output}", "trainer.max_steps=3"], *LAYOUTS[layout])
                recorded[f"{name} {layout}"] = outcome(output)
                print(f"{name} {layout}: {recorded[f'{name} {layout}']['weights'][:12]}", flush=True)
    return recorded


def run(program: str, settings: list[str], processes: int, layout: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    (empty := Path(tempfile.mkdtemp()) / "empty.yaml").write_text("{}\n")
    command += [str(SCRIPTS / f"train_{program}.py"), str(empty), *settings, *layout]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_SECONDS)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")


def outcome(output: Path) -> dict:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    digest = hashlib.sha256()
    for file in sorted((output / "hf").glob("*.safetensors")):
        digest.update(file.read_bytes())
    timed = ("seconds", "per_second", "utilization", "bytes", "mfu")
    return {
        "metrics": [{k: v for k, v in row.items() if not k.endswith(timed)} for row in rows],
        "weights": digest.hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    recorded = record()
    if arguments.action == "record":
        arguments.file.write_text(json.dumps(recorded, indent=1))
        return
    expected = json.loads(arguments.file.read_text())
    different = [name for name in expected if recorded.get(name) != expected[name]]
    print(f"{len(expected) - len(different)} of {len(expected)} are equal bit for bit")
    for name in different:
        print(f"{name}:\n  was {expected[name]}\n  is  {recorded.get(name)}")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
