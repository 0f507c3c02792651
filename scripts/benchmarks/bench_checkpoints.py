"""Measure the stall of training during a save, and the memory of a conversion, within one run.

    OMP_NUM_THREADS=2 python scripts/benchmarks/bench_checkpoints.py [--hidden 768] [--layers 8]

Stall: seconds that training stops for an asynchronous save, divided by those of a synchronous save; medians of
interleaved repetitions, on two threads. Memory: growth of a converting process to its peak, compared with the size of
the largest tensor or, if shards are written, of a shard. Exits with 1 if a bound is missed.
"""

import argparse
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_results import Row, finish
from peak_memory import PeakMemory
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from mcore_rl.config import SFTConfig
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.platform import initialize_platform
from mcore_rl.utils.console import quiet_libraries

SHARD_BYTES = 10**8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--repetitions", type=int, default=4)
    arguments = parser.parse_args()
    quiet_libraries()
    initialize_platform()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        make_model(root / "model", arguments)
        conversion = measure_conversion(root)
        stall, megabytes = measure_stall(root, arguments.repetitions)
    columns, is_whole = ("asynchronous, s", "synchronous, s", "stall / save"), arguments == parser.parse_args([])
    title = f"Training stands still for an asynchronous save; a checkpoint of {megabytes:,.0f} MB"
    missed = finish("checkpoints", title, columns, [stall], is_whole)
    columns = ("peak, MB", "beside, MB", "ratio")
    return missed | finish("conversion", "Most memory of a conversion", columns, conversion, is_whole)


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
    """Return the table's row about the stall of training, and the size of a checkpoint in megabytes."""
    from mcore_rl.losses.common import NLLLoss
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
    policy.shutdown()
    ratio = statistics.median(a / b for a, b in zip(stall, whole, strict=True))
    stall, whole = statistics.median(stall), statistics.median(whole)
    return Row("stall / synchronous save", stall, whole, ratio, at_most=0.25), size


def stalled(policy, directory, step):
    """Return the seconds that an asynchronous save takes on the training thread: start, polls and commit."""
    seconds, finished, started = 0.0, None, time.perf_counter()
    policy.save_checkpoint(directory, step, {}, wait=False)
    while finished is None:
        seconds += time.perf_counter() - started
        time.sleep(0.1)  # a training step
        started = time.perf_counter()
        finished = policy.checkpoint.finish(wait=False)
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
    tensor, shard = max(sizes) / 1e6, SHARD_BYTES / 1e6
    print(f"the model has {sum(sizes) / 1e6:,.0f} MB, its largest tensor {tensor:,.0f} MB")
    context, rows = multiprocessing.get_context("spawn"), []
    for name, convert, beside, bound in (
        ("from-hf / largest tensor", to_megatron, tensor, 3),
        ("to-hf / largest tensor and shard", to_hf, tensor + shard, 2),
    ):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=measure_peak, args=(sender, convert, root))
        process.start()
        peak = receiver.recv() / 1e6
        process.join()
        rows.append(Row(name, peak, beside, peak / beside, at_most=bound))
    return rows


def to_megatron(root):
    from mcore_rl.models.megatron.checkpoint.convert import hf_to_megatron

    hf_to_megatron(root / "model", root / "megatron", lambda items, total: items)


def to_hf(root):
    from mcore_rl.models.megatron.checkpoint.convert import megatron_to_hf

    iteration = root / "megatron" / "iter_0000001"
    megatron_to_hf(iteration, root / "model", root / "hf", lambda items, total: items, max_shard_bytes=SHARD_BYTES)


def measure_peak(sender, convert, root):
    quiet_libraries()
    initialize_platform()
    import mcore_rl.models.megatron.checkpoint.convert  # noqa: F401 (imports are not what is measured)

    with PeakMemory() as peak:
        convert(root)
    sender.send(peak.bytes)


if __name__ == "__main__":
    sys.exit(main())
