"""Check your configuration and data under many parallel layouts, on a small model of the same architecture.

    mcore-rl layouts CONFIG [key=value …] [--layouts tp=1,2 pp=1,2 cp=1,2 dp=1,2 ep=1,2 …]
        [--device cuda] [--dtype bfloat16] [--transformer-impl transformer_engine]

Runs on the CPU, also on machines with GPUs, unless --device=cuda is given. Processes that have no GPU of their own
share GPUs and communicate through host memory.

Prints the relative differences of each layout from one process. The exit status is 1 if a difference is larger than
rounding, and otherwise 4 if a layout was cut off by the time limit of five minutes for each layout.
With --dtype bfloat16, the differences are from one process in float32, and may be 1.5 times those of one process in
bfloat16 (3 times for a single parameter).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.cli.entry_point import Parser, count, exit_on_error, with_local_models
from mcore_rl.cli.train import PROGRAMS, load_for
from mcore_rl.config import GRPOConfig, ParallelConfig, TrainingConfig
from mcore_rl.config.algorithms import own_layouts
from mcore_rl.config.parallel import ParallelLayout, own_split, parse_layouts
from mcore_rl.data.readers import check_file
from mcore_rl.errors import UserError
from mcore_rl.testing.cluster.verdicts import NO_TIME_STATUS
from mcore_rl.testing.gpus import hide_gpus, no_gpu
from mcore_rl.utils.console import quiet_libraries
from mcore_rl.utils.model_directory import check_model_directory
from mcore_rl.utils.packages import check_packages, import_torch

if TYPE_CHECKING:  # these modules import PyTorch
    from mcore_rl.distributed.batched_data_dict import BatchedDataDict
    from mcore_rl.testing.processes import Start

DEFAULT_LAYOUTS = ["tp=1,2", "pp=1,2", "cp=1,2"]


def layouts(arguments: Sequence[str], prog: str) -> None:
    """Run `mcore-rl layouts`, and exit.

    The exit status is 0 if all layouts agree with one process, 1 if one does not, 2 after a user's error, and 4 if all
    that were compared agree but one took too long.
    """
    parser = Parser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="YAML file of the algorithm's training script")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--layouts", nargs="+", default=DEFAULT_LAYOUTS, metavar="KEY=1,2")
    parser.add_argument("--max-processes", type=count, default=8, help="leave out layouts with more processes")
    parser.add_argument("--algorithm", choices=[name for name in PROGRAMS if name != "ppo"], default="dpo")
    parser.add_argument("--steps", type=count, default=3, help="optimizer steps before weights are compared")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--transformer-impl", choices=["auto", "local", "transformer_engine"], help="instead of model.transformer_impl"
    )
    parser.add_argument("--show-steps", action="store_true", help="print loss and gradient norm of each step as well")
    parsed = parser.parse_intermixed_args(arguments)
    hide_gpus()  # only the processes of the layouts use GPUs
    quiet_libraries()
    with exit_on_error():
        check_packages()
        if parsed.device == "cuda" and (reason := no_gpu()):
            raise UserError(f"--device cuda: {reason}")
        config = with_local_models(load_for(parsed.algorithm, parsed.config, parsed.overrides))
        check_model_directory(config.model.path)
        for source in config.data.train_sources:
            check_file(source)
        chosen = [x for x in parse_layouts(parsed.layouts) if x.world_size <= parsed.max_processes]
        if not chosen:
            raise UserError(
                f"--max-processes {parsed.max_processes}: every layout needs more processes; use a larger number"
            )
        import_torch()
        status = verify(parsed, config, chosen)
    sys.exit(status)


def verify(arguments: Namespace, config: TrainingConfig, layouts: list[ParallelLayout]) -> int:
    """Compare the layouts with one process on a small model, print the differences, and return the exit status."""
    from mcore_rl.platform import initialize_platform

    initialize_platform()
    from mcore_rl.data.images import image_directory
    from mcore_rl.data.token_cache import default_directory
    from mcore_rl.data.tokenize import load_tokenizer
    from mcore_rl.models.megatron.model.hf_config import check_model_fits, hf_config_of
    from mcore_rl.testing.layout_inputs import first_batch, invent_rollouts, with_layers, with_small_model
    from mcore_rl.testing.processes import Start

    start = Start(arguments.device)
    config = with_layers(config, arguments.transformer_impl, start)
    hf_config = hf_config_of(config.model)
    check_model_fits(hf_config, ParallelConfig(), config.data.max_sequence_length)
    images = image_directory(config.data.cache_dir or default_directory())
    trusted, template = config.model.trust_remote_code, config.data.read_chat_template()
    tokenizer = load_tokenizer(config.model.path, trusted, template, images=images)
    data = invent_rollouts(config, tokenizer) if isinstance(config, GRPOConfig) else first_batch(config, tokenizer)
    with tempfile.TemporaryDirectory() as directory:
        config = with_small_model(config, Path(directory), layouts, arguments.dtype)
        reference = "one process" if arguments.dtype == "float32" else "one process in float32"
        print(f"{data.size} sequences of {', '.join(config.data.train_sources)}, relative differences from {reference}")
        layouts = fitting_layouts(config, layouts, arguments.max_processes)
        return print_differences(config, data, layouts, start, arguments)


def fitting_layouts(config: TrainingConfig, layouts: list[ParallelLayout], most: int) -> list[ParallelLayout]:
    """Return the layouts that fit the small model, and the configuration's own pipeline split; print what is left out.

    Args:
        config: the configuration, with the small model.
        most: largest number of processes.
    """
    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.model.hf_config import load_hf_config
    from mcore_rl.testing.layout_check import fitting
    from mcore_rl.testing.layout_inputs import with_layers

    model = config.model
    try:
        family = family_of(load_hf_config(model.path, model.trust_remote_code, model.head))
        own = own_split(config.parallel, family.num_layers)
        if own and own.world_size > most:
            raise UserError(f"needs {own.world_size} processes, more than --max-processes")
        layouts = [*layouts, own] if own else layouts
    except UserError as error:
        print(f"left out: the configuration's own pipeline split: {error}")
    for key in own_layouts(config):
        print(f"not checked: {key}: every model has the layout of its row")
    # This process sees no GPU, so it may be unable to use Transformer Engine.
    fits, refused = fitting(layouts, with_layers(config, "local"))
    for layout, reason in refused:
        print(f"left out: {layout}: {reason}")
    return fits


def print_differences(
    config: TrainingConfig,
    data: BatchedDataDict[Any],
    layouts: list[ParallelLayout],
    start: Start,
    arguments: Namespace,
) -> int:
    """Print each layout's differences as soon as they are known; return the exit status."""
    from mcore_rl.testing.layout_check import TABLE_HEADER, check_layouts, steps_table, table_row

    print(TABLE_HEADER)
    right = on_time = True
    for layout, difference in check_layouts(config, data, layouts, arguments.steps, start):
        print(table_row(layout, difference), flush=True)
        if difference is None:
            on_time = False
            continue
        if arguments.show_steps:
            print(*steps_table(layout, difference), sep="\n", flush=True)
        right &= difference.within()
    return 1 if not right else 0 if on_time else NO_TIME_STATUS
