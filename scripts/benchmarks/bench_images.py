"""Measure steps on rows with images: packed against padded rows, and the share of the vision tower.

    OMP_NUM_THREADS=1 python scripts/benchmarks/bench_images.py

A Qwen3-VL with a text model of 7 million parameters and a tower of 1.2 million, in fp32. A row has up to two images of
16 to 100 tokens and a text of log-normal length. All times are CPU times, medians of interleaved repetitions.

- A training step of packed rows, and of the same rows in microbatches of four padded rows.
- The share of the tower in a scoring pass and a training step on the same rows: frozen with features that are not kept
  (as of new images in each step), frozen with features that are kept, and trained. The time of the tower includes
  reading and resizing the images.

Exits with 1 if a bound is missed.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from bench_results import Row, finish
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from mcore_rl.config import SFTConfig
from mcore_rl.data.images import IMAGES, ImageReader
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.platform import initialize_platform
from mcore_rl.utils.console import quiet_libraries

VOCABULARY, IMAGE_TOKEN = 8192, 8
SIDE = 32  # pixels of an image token: a patch of 16, merged 2 × 2
ROWS, PADDED_TOGETHER = 32, 4
PACKED = 1.5
"""Bound of packing: up to half of the places in padded rows are padding, and attention over packs costs no more."""
SHARES = {"frozen, features not kept": 0.35, "frozen, features kept": 0.02, "trained": 0.45}
"""Bounds of the tower's share. For an image token, the tower multiplies 4 patches with 1.2 million parameters; for any
token, the text model multiplies with 4.7 million. Up to half of the tokens belong to images. A trained tower has a
backward pass too."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rows", type=int, default=ROWS)
    arguments = parser.parse_args()
    quiet_libraries()
    initialize_platform()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_model(directory)
        data = make_rows(directory, arguments.rows)
        rows = [measure_packing(directory, data, arguments.repetitions)]
        rows += measure_shares(directory, data, arguments.repetitions)
    columns = ("padded, or tower, s", "packed, or step, s", "first / second")
    return finish("images", "Steps on rows with images", columns, rows, keep=arguments == parser.parse_args([]))


def make_model(directory):
    torch.manual_seed(0)
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]},
        "tie_word_embeddings": True,
    }  # fmt: skip
    tower = {
        "depth": 6, "hidden_size": 128, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": 256,
        "patch_size": SIDE // 2, "num_position_embeddings": 256, "deepstack_visual_indexes": [1, 3],
    }  # fmt: skip
    config = CONFIG_MAPPING["qwen3_vl"](
        text_config=text, vision_config=tower, image_token_id=IMAGE_TOKEN, tie_word_embeddings=True
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": SIDE // 2,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": SIDE**2, "longest_edge": 100 * SIDE**2},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))


def make_rows(directory, count):
    """Return rows of images and texts; the images are written to `directory`."""
    from PIL import Image

    generator, pixels = random.Random(5), torch.Generator().manual_seed(6)
    reader, ids, placed = ImageReader(directory), [], []
    for row in range(count):
        tokens, images = [], []
        for number in range(generator.choice((0, 1, 1, 2))):
            path = directory / f"{row}_{number}.png"
            size = [SIDE * generator.randrange(4, 11) for _ in range(2)]
            Image.fromarray(torch.randint(0, 256, (*size, 3), dtype=torch.uint8, generator=pixels).numpy()).save(path)
            images.append(reader.placed(str(path), len(tokens)))
            tokens += [IMAGE_TOKEN] * images[-1].count
        length = min(1024, max(16, int(generator.lognormvariate(4.2, 0.8))))
        tokens += [generator.randrange(10, VOCABULARY) for _ in range(length)]
        ids.append((tokens, length))
        placed.append(tuple(images))
    width = max(len(tokens) for tokens, _ in ids)
    input_ids, mask = torch.zeros(count, width, dtype=torch.long), torch.zeros(count, width)
    for row, (tokens, length) in enumerate(ids):
        input_ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, len(tokens) - length + 1 : len(tokens)] = 1
    lengths = torch.tensor([len(tokens) for tokens, _ in ids])
    print(f"{count} rows of {lengths.sum().item():,} tokens, {sum(i.count for r in placed for i in r):,} of images")
    return BatchedDataDict(
        input_ids=input_ids, token_mask=mask, input_lengths=lengths, sample_mask=torch.ones(count), **{IMAGES: placed}
    )


def make_policy(directory, batch, tower="frozen"):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    config = SFTConfig.model_validate(
        {
            "output_dir": directory / "unused",
            "model": {"path": directory, "vision_tower": tower},
            "data": {"train": "unused", "max_sequence_length": 2048},
            "batch": {"global_batch_size": 4, **batch},
            "optimizer": {"lr": 1e-5},
            "trainer": {"max_steps": 1},
            "checkpoint": {"export_hf": False},
        }
    )
    return MegatronPolicy(config, total_steps=1000)


def measure_packing(directory, data, repetitions):
    """Return the row of a padded and a packed step. Both have kept the features of all images, in an earlier step."""
    from mcore_rl.losses.common import NLLLoss

    padded = {"packing": False, "micro_batch_size": PADDED_TOGETHER}
    policies = [make_policy(directory, batch) for batch in (padded, {"tokens_per_pack": 4096})]
    seconds = [[], []]
    for _ in range(repetitions + 1):
        for policy, times in zip(policies, seconds, strict=True):
            started = time.process_time()
            policy.train(data, NLLLoss())
            times.append(time.process_time() - started)
    of_padded, of_packed = (statistics.median(times[1:]) for times in seconds)  # the first is a warm-up
    return Row("padded / packed rows", of_padded, of_packed, of_padded / of_packed, at_least=PACKED)


def measure_shares(directory, data, repetitions):
    """Return the rows of the tower's shares."""
    frozen, trained = (make_policy(directory, {"tokens_per_pack": 4096}, tower) for tower in ("frozen", "trained"))
    cases = dict(zip(SHARES, (frozen, frozen, trained), strict=True))
    times = {name: [] for name in cases}
    for _ in range(repetitions + 1):
        for name, policy in cases.items():
            if name.endswith("not kept"):
                policy.model.tower.kept = type(policy.model.tower.kept)()
            times[name].append(step_and_tower(policy, data))
    rows = []
    for name, bound in SHARES.items():
        step, tower = (statistics.median(values) for values in zip(*times[name][1:], strict=True))
        rows.append(Row(f"share of a tower: {name}", tower, step, tower / step, at_most=bound))
    return rows


def step_and_tower(policy, data):
    """Return the CPU seconds of a scoring pass and a training step, and those of the tower in them."""
    from mcore_rl.losses.common import NLLLoss

    with timed_tower(policy.model.tower) as seconds:
        started = time.process_time()
        policy.get_logprobs(data)
        policy.train(data, NLLLoss())
        step = time.process_time() - started
    return step, sum(seconds)


@contextmanager
def timed_tower(tower):
    """Context with a list of the seconds of the tower's forward and backward passes."""
    seconds, features, module = [], tower.features, tower.module
    began = []

    def timed(division):
        started = time.process_time()
        found = features(division)
        seconds.append(time.process_time() - started)
        if found.requires_grad:  # the backward pass of the tower follows the gradient of its features, and ends a step
            found.register_hook(lambda _: began.append(time.process_time()))
        return found

    def ended(*_):
        seconds.append(time.process_time() - began.pop())

    first = next(module.parameters())
    handle = first.register_post_accumulate_grad_hook(ended) if first.requires_grad else None
    tower.features = timed
    try:
        yield seconds
    finally:
        del tower.features
        if handle is not None:
            handle.remove()


if __name__ == "__main__":
    sys.exit(main())
