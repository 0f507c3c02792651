"""The dry run (`--dry-run`): check everything, and print a description of the run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE

from mcore_rl import platform
from mcore_rl.algorithms.grpo import check_inputs
from mcore_rl.config import PPOConfig, RLConfig, TrainingConfig
from mcore_rl.data.batching import microbatch_planner
from mcore_rl.data.chat import image_tokens, reads_images
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.data.images import PlacedImage
from mcore_rl.data.token_cache import default_directory
from mcore_rl.data.token_store import TokenSequence
from mcore_rl.errors import UserError
from mcore_rl.models.generation.vllm.placement import describe_places, place_servers, planned_nodes, with_host
from mcore_rl.run.converted_checkpoint import CONVERTED
from mcore_rl.run.identity import model_directories
from mcore_rl.run.setup import check_models, check_output_dir, load_inputs
from mcore_rl.simulation.search import chosen_ranks, simulate
from mcore_rl.simulation.sequences import Sequences, sequences_of
from mcore_rl.utils import torchrun
from mcore_rl.utils.console import counted
from mcore_rl.utils.model_directory import has_only_config

GPUS_PER_NODE = 8
"""GPUs of a node for which servers are placed if torch finds no GPU on this machine."""
SHOWN_RANKS, SHOWN_RECORDS, SHOWN_CHARACTERS = 64, 3, 600


def run_dry(
    given: TrainingConfig, record: Path | None = None, replay: Path | None = None, per_node: int | None = None
) -> None:
    """Run all checks of a run, without training; print a description of the run on rank 0.

    Models are checked, and memory is estimated, for a run on GPUs, even if this machine has none.

    Args:
        given: the configuration. Its values may still be `auto`.
        per_node: number of processes of each node; None if it is not known.

    Raises:
        UserError: a check fails.
    """
    config, world_size = platform.resolve(_for_this_machine(given)), torchrun.world_size()
    on_gpu = given.for_device(on_gpu=True, te_problem="is not simulated", simulates=True)
    if has_only_config(config.model.path):
        if torchrun.rank() == 0:
            check_models(on_gpu)
            for line in chain(describe_servers(on_gpu, world_size, per_node), describe_plan(on_gpu, world_size)):
                print(line, flush=True)
        return
    if given.model.transformer_impl == "local" or find_spec("transformer_engine") is None:
        check_models(on_gpu)  # otherwise a GPU would run other layers than a simulation, which has only local ones
    if isinstance(config, RLConfig):
        inputs, _ = check_inputs(config, record, replay)
    else:
        inputs = load_inputs(config)
    if torchrun.rank() > 0:
        return
    inputs, steps = check_output_dir(config, inputs), config.total_steps(len(inputs.train))
    servers = [] if replay and config.data.validation is None else describe_servers(on_gpu, world_size, per_node)
    for line in chain(inputs.checkpoints[1], servers, describe_run(config, on_gpu, inputs, steps, world_size)):
        print(line, flush=True)
    written = [] if inputs.cache is None else [f"tokenized data to {inputs.cache} (data.cache_dir)"]
    hub = Path(HF_HUB_CACHE)
    if any(path.is_relative_to(hub) for path in model_directories(config).values()):
        written.append(f"models that were missing to the hub's cache ({hub})")
    converted = default_directory() / CONVERTED
    if any(path.is_relative_to(converted) for path in model_directories(config).values()):
        written.append(f"the model that was missing to {converted}")
    told = f"it wrote {' and '.join(written)}, and nothing else" if written else "nothing was written"
    print(f"this was a dry run: {told}")


def _for_this_machine(given: TrainingConfig) -> TrainingConfig:
    """Return the configuration without FP8 if this machine lacks Transformer Engine.

    Raises:
        UserError: a GPU with Transformer Engine would refuse the configuration's FP8 too.
    """
    if given.model.fp8 is None or platform.te_problem() is None:
        return given
    given.for_device(on_gpu=True, te_problem=None, simulates=False)
    without = given.model.model_copy(update={"fp8": None, "transformer_impl": "auto"})
    return given.model_copy(update={"model": without})


def describe_servers(config: TrainingConfig, world_size: int, per_node: int | None = None) -> Iterator[str]:
    """Yield lines about the vLLM servers of a run: node, address, port and GPUs of each.

    The nodes have as many GPUs as torch finds on this machine or, if it finds none, `GPUS_PER_NODE`.

    Args:
        per_node: number of processes of each node. None if it is not known: one for each GPU is assumed, and if the
            servers do not fit then, a warning names a number with which they do.

    Raises:
        UserError: the servers do not fit on nodes like this machine.
    """
    if not isinstance(config, RLConfig) or config.generation.backend != "vllm":
        return
    if urls := config.generation.vllm.urls:
        yield f"vLLM's servers: {counted(len(urls), 'server')}, which must run already: {', '.join(urls)}"
        return
    found = len(platform.gpu_names())
    gpus = found or GPUS_PER_NODE
    nodes = planned_nodes(world_size, gpus, per_node)
    kind = f"{counted(len(nodes), 'node')} of {counted(gpus, 'GPU')}"
    if per_node not in (None, gpus):
        kind += f" with {counted(per_node, 'process', 'processes')}{' each' if len(nodes) > 1 else ''}"
    try:
        yield from describe_places(place_servers(config, with_host(config, nodes)), f"vLLM's servers on {kind}")
    except UserError as error:
        fitting = _fitting_processes(config, world_size, gpus) if per_node is None else None
        if found and fitting is None:
            raise
        assumed = (
            ""
            if fitting is None
            else (
                f" (this assumes a process on each GPU; with {fitting} on each node, the servers would fit: "
                f"--dry-run {world_size // fitting}x{fitting})"
            )
        )
        yield f"warning: on {kind}, this run would be refused: {error}{assumed}"


def _fitting_processes(config: RLConfig, world_size: int, gpus: int) -> int | None:
    """Return the largest number of processes of each node with which the servers fit; None if there is none."""
    for per_node in range(min(gpus, world_size), 0, -1):
        if world_size % per_node == 0:
            with suppress(UserError):
                place_servers(config, with_host(config, planned_nodes(world_size, gpus, per_node)))
                return per_node
    return None


def describe_plan(config: TrainingConfig, world_size: int) -> Iterator[str]:
    """Yield lines about the memory of a run whose model directory has only a config.json.

    The sequences have `data.max_sequence_length` tokens, because there is no tokenizer for the data.

    Args:
        config: the configuration for a run on GPUs.
    """
    length = config.data.max_sequence_length
    sequences = sequences_of(config, [length])
    yield f"{config.model.path} has only a config.json: memory is for the longest sequences, of {length:,} tokens"
    yield from memory(config, sequences, world_size)
    yield (
        "this was a dry run: weights, tokens of the data and output_dir were not checked; for the time of a step, run "
        f"mcore-rl simulate CONFIG --algorithm {config.algorithm} --world-size {world_size} --lengths {length}"
    )


def describe_run(
    config: TrainingConfig, on_gpu: TrainingConfig, inputs: Any, steps: int, world_size: int
) -> Iterator[str]:
    """Yield lines about the length of the run, the first step's packs and records, and memory.

    Args:
        on_gpu: the configuration for which memory is estimated: each `auto` has its value for a run on GPUs.
        inputs: the run's `RunInputs`.
        steps: number of steps of the whole run.
    """
    dataset = inputs.train
    yield dataset.describe("train", config.data.max_sequence_length)
    sequences, of_records = first_batch(config, dataset)
    tokens = sum(sequences.lengths)
    if isinstance(config, PPOConfig):
        critic, alone = config.critic.path or config.model.path, config.critic.pretraining_steps
        yield f"critic: {critic}" + (f", trained alone in the first {alone:,} steps" if alone else "")
    of_step = counted(len(sequences.lengths), "sequence")
    yield f"{counted(steps, 'step')}, of {of_step}; the first has {counted(tokens, 'token')}"
    if config.batch.packing:
        yield from packs(on_gpu, sequences, world_size)
    yield from records(inputs.tokenizer, of_records)
    yield from memory(on_gpu, sequences, world_size)


def first_batch(config: TrainingConfig, dataset: Any) -> tuple[Sequences, list[TokenSequence]]:
    """Return the lengths and images of the first step's sequences, and the first of these sequences.

    Responses that are generated are assumed to have the maximum length.
    """
    order = dataset.order(config.seed)
    if isinstance(config, RLConfig) and isinstance(dataset, PromptDataset):
        prompts = [dataset.prompts[i] for i in order.indices(0, config.rollouts.num_prompts_per_step)]
        shown = [TokenSequence(one.input_ids, (False,) * len(one.input_ids)) for one in prompts[:SHOWN_RECORDS]]
        group = config.rollouts.num_generations_per_prompt
        asked = [prompt for prompt in prompts for _ in range(group)]
        return _answered(config, [len(one.input_ids) for one in asked], [one.images for one in asked]), shown
    size, epochs = config.batch.global_batch_size, config.trainer.max_epochs
    count = size if epochs is None else min(size, epochs * len(dataset))
    units = [dataset.units[i] for i in order.indices(0, count)]
    rows = [sequence for unit in units for sequence in unit]
    of_rows = [sequence.images for sequence in rows]
    shown = [sequence for unit in units[:SHOWN_RECORDS] for sequence in unit]
    if config.max_answer_length is not None:
        return _answered(config, [sequence.token_mask.index(True) for sequence in rows], of_rows), shown
    trained = tuple(sum(sequence.token_mask) for sequence in rows)
    return Sequences(tuple(map(len, rows)), trained, _images(of_rows)), shown


def _images(of_rows: Sequence[Sequence[PlacedImage]]) -> tuple[tuple[PlacedImage, ...], ...]:
    return tuple(map(tuple, of_rows)) if any(of_rows) else ()


def _answered(config: TrainingConfig, prompts: Sequence[int], images: Sequence[Sequence[PlacedImage]]) -> Sequences:
    """Return sequences: each has a prompt of the given length, with its images, and an answer of maximum length."""
    assert config.max_answer_length is not None, "the policy answers"
    lengths = tuple(min(n + config.max_answer_length, config.data.max_sequence_length) for n in prompts)
    responses = tuple(whole - n for whole, n in zip(lengths, prompts, strict=True))
    return Sequences(lengths, responses, _images(images))


def packs(config: TrainingConfig, sequences: Sequences, world_size: int) -> Iterator[str]:
    """Yield lines about the packs of the first step.

    Common prefixes are counted in every sequence, even if the run stores them only once.
    """
    replicas = config.parallel.data_parallel_size(world_size)
    batching = microbatch_planner(config, config.rows_per_unit, replicas)
    plan = batching.plan(list(sequences.lengths))
    count = len(plan[0])
    room = replicas * count * batching.tokens_per_pack
    where = "" if replicas == 1 else f" on each of {replicas} replicas"
    filled = sum(sequences.lengths) / room
    yield f"  {counted(count, 'pack')} of {batching.tokens_per_pack:,} tokens{where}, {filled:.0%} filled"


def records(tokenizer: Any, shown: Sequence[TokenSequence]) -> Iterator[str]:
    """Yield lines with the sequences `shown` as the model reads them, with » and « around trained tokens."""
    yield "the first records, what is trained on between » and «:"
    for sequence in shown:
        text, trained = "", False
        start = 0
        for position, mark in enumerate([*sequence.token_mask, False]):
            if mark != trained or position == len(sequence):
                text += text_of_tokens(tokenizer, sequence.input_ids, start, position)
                text += "»" if mark else "«" if trained else ""
                start, trained = position, mark
        text = with_counted_images(tokenizer, text).replace("\n", "\\n")
        yield f"  {text[:SHOWN_CHARACTERS]}{' …' if len(text) > SHOWN_CHARACTERS else ''}"


def with_counted_images(tokenizer: Any, text: str) -> str:
    """Return `text` with the token of each image written once, followed by the number of its repetitions."""
    if not reads_images(tokenizer):
        return text
    token = image_tokens(tokenizer).text
    # Some tokenizers decode to text with a space between the tokens.
    return re.sub(f"(?:{re.escape(token)} ?)+", lambda run: f"{token} × {run[0].count(token)} ", text)


def text_of_tokens(tokenizer: Any, ids: Sequence[int], start: int, end: int) -> str:
    """Return the text of the tokens `start` … `end` − 1 as a part of the whole text.

    Tokens that are decoded alone may lose a space at their start.
    """
    before, whole = (tokenizer.decode(list(ids[:n]), clean_up_tokenization_spaces=False) for n in (start, end))
    if start and whole.startswith(before):
        return str(whole[len(before) :])
    return str(tokenizer.decode(list(ids[start:end]), clean_up_tokenization_spaces=False))


def memory(config: TrainingConfig, sequences: Sequences, world_size: int) -> Iterator[str]:
    """Simulate a rank of each distinct pipeline stage; yield lines about the memory that such a rank needs."""
    ranks = chosen_ranks(config, world_size, "distinct")
    yield f"memory: simulating a step of {counted(len(ranks), 'rank')} …"
    try:
        reports = simulate(config, world_size, ranks, sequences, say=partial(print, flush=True))
    except UserError as error:
        yield f"memory: not estimated ({error})"
        return
    for report in reports:
        parts = ", ".join(f"{kind} {size / 1e9:.2f}" for kind, size in report.memory.items())
        yield f"memory of rank {report.rank} at the peak of a step, on a GPU: {report.peak / 1e9:.2f} GB ({parts})"
