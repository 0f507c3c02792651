"""What saving costs the training thread, and what conversion costs in memory, measured within one run.

    OMP_NUM_THREADS=2 python scripts/bench_checkpoints.py [--hidden 768] [--layers 8]

Stall: seconds that training stands still for an asynchronous save, over those of a synchronous one; medians of
interleaved repetitions. Memory: the peak of a converting process beyond its start, beside the size of
the model and of its largest tensor.
"""

import argparse
import math
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import torch
from peak_memory import PeakMemory
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from mcore_rl.config import SFTConfig
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.quiet import quiet_libraries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    quiet_libraries()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        make_model(root / "model", arguments)
        measure_conversion(root)
        measure_stall(root, arguments.repetitions)


def make_model(directory, arguments):
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def measure_stall(root, repetitions):
    from mcore_rl.algorithms.loss_functions import NLLLoss
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    config = SFTConfig.model_validate(
        {
            "output_dir": root,
            "model": {"path": root / "model"},
            "data": {"train": "unused", "max_sequence_length": 64},
            "batch": {"global_batch_size": 1},
            "optimizer": {"lr": 1e-5},
            "trainer": {"max_steps": 1},
            "checkpoint": {"keep_last": 1},
        }
    )
    policy = MegatronPolicy(config, total_steps=100)
    policy.train(some_data(), NLLLoss())
    whole, stall = [], []
    for step in range(0, 2 * repetitions, 2):
        started = time.perf_counter()
        policy.save_checkpoint(root / "checkpoints", step, {})
        whole.append(time.perf_counter() - started)
        stall.append(stalled(policy, root / "checkpoints", step + 1))
    size = sum(path.stat().st_size for path in (root / "checkpoints").rglob("*.distcp")) / 1e6
    ratio = statistics.median(a / b for a, b in zip(stall, whole, strict=True))
    print(f"checkpoint of {size:,.0f} MB: stall of an asynchronous save / synchronous save {ratio:.3f}")
    policy.shutdown()


def stalled(policy, directory, step):
    """Seconds that an asynchronous save takes of the training thread: its beginning, the looks at it, the commit."""
    seconds, finished, started = 0.0, None, time.perf_counter()
    policy.save_checkpoint(directory, step, {}, wait=False)
    while finished is None:
        seconds += time.perf_counter() - started
        time.sleep(0.1)  # a training step
        started = time.perf_counter()
        finished = policy.finish_saving(wait=False)
    return seconds + time.perf_counter() - started


def some_data():
    return BatchedDataDict(
        input_ids=torch.randint(0, 1000, (1, 64)),
        token_mask=torch.ones(1, 64),
        input_lengths=torch.tensor([64]),
        sample_mask=torch.ones(1),
    )


def measure_conversion(root):
    with safe_open(root / "model" / "model.safetensors", framework="pt") as file:
        sizes = [4 * math.prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
    context = multiprocessing.get_context("spawn")
    for convert in (to_megatron, to_hf):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=measure_peak, args=(sender, convert, root))
        process.start()
        peak = receiver.recv()
        process.join()
        print(
            f"{convert.__name__}: peak {peak / 1e6:,.0f} MB; the model has {sum(sizes) / 1e6:,.0f} MB, "
            f"its largest tensor {max(sizes) / 1e6:,.0f} MB"
        )


def to_megatron(root):
    from mcore_rl.models.megatron.convert import hf_to_megatron

    hf_to_megatron(root / "model", root / "megatron", lambda items, total: items)


def to_hf(root):
    from mcore_rl.models.megatron.convert import megatron_to_hf

    iteration = root / "megatron" / "iter_0000000"
    megatron_to_hf(iteration, root / "model", root / "hf", lambda items, total: items, max_shard_bytes=10**8)


def measure_peak(sender, convert, root):
    quiet_libraries()
    import mcore_rl.models.megatron.convert  # noqa: F401 (imports are not what is measured)

    with PeakMemory() as peak:
        convert(root)
    sender.send(peak.bytes)


if __name__ == "__main__":
    main()
