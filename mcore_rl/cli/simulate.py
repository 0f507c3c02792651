"""Simulate a training step of any size on this machine: memory, operations, transfers and estimated time.

    mcore-rl simulate CONFIG --world-size 256 --algorithm dpo [--hardware h100] [key=value …]
    mcore-rl simulate CONFIG --world-size 64 --algorithm dpo --lengths 4096 --search

The training code runs for one rank of the first and of the last pipeline stage (in an uneven pipeline, of one stage for
each number of layers), on tensors without memory and groups without peers. Of the model, only config.json is needed.
Lengths are those of the data, or of --lengths. With --load-from the ranks first load a checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from mcore_rl.cli.entry_point import Parser, count, exit_on_error, with_local_models
from mcore_rl.cli.train import PROGRAMS, load_for
from mcore_rl.config import DPOConfig, ParallelConfig, TrainingConfig
from mcore_rl.config.base import whole_number
from mcore_rl.errors import UserError
from mcore_rl.run.preflight import check_layout, check_lengths, check_sources
from mcore_rl.utils.console import quiet_libraries
from mcore_rl.utils.model_directory import vision_model_config
from mcore_rl.utils.packages import check_packages, import_torch

if TYPE_CHECKING:  # these modules import PyTorch
    from mcore_rl.simulation.hardware import Hardware
    from mcore_rl.simulation.sequences import Sequences


def simulate(arguments: Sequence[str], prog: str) -> None:
    """Run `mcore-rl simulate`. A user's error gives status 2."""
    parser = Parser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="YAML file of the algorithm's training script")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--world-size", type=count, required=True, help="number of processes of the run")
    parser.add_argument("--algorithm", choices=PROGRAMS, required=True, help="algorithm of the training script")
    parser.add_argument(
        "--hardware", default="h100", help="h100 (default), h200, a100, b200, gb200, gb300, or FILE:NAME"
    )
    parser.add_argument("--lengths", help="lengths of the sequences in tokens: 2048,512,…")
    parser.add_argument("--response-part", type=float, help="with --lengths, fraction of response tokens (default 0.5)")
    parser.add_argument("--image-tokens", help="with --lengths, tokens of the images in each prompt: 256,1024,…")
    parser.add_argument("--ranks", help="ranks: distinct (default), first, last, stages, or numbers")
    parser.add_argument(
        "--expert-imbalance", type=float, default=1.0, metavar="F",
        help="the simulated ranks' experts get F times the mean of tokens (default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--transformer-engine", action="store_true", help="estimate with Transformer Engine's products, not with copies"
    )
    parser.add_argument("--search", action="store_true", help="search layouts; ignore the configuration's")
    parser.add_argument("--load-from", type=count, metavar="RANKS", help="number of ranks that wrote a checkpoint")
    parser.add_argument("--workers", type=count, default=1, help="number of processes to simulate with")
    parsed = parser.parse_intermixed_args(arguments)
    quiet_libraries()
    with exit_on_error():
        check_packages()
        import_torch()
        from mcore_rl.simulation.hardware import Hardware

        # With --lengths the simulation reads no data, so the configuration may lack data.train.
        unread = [] if parsed.lengths is None else ["data.train=not read"]
        config = load_for(parsed.algorithm, parsed.config, [*unread, *parsed.overrides])
        config = config.for_device(on_gpu=True, te_problem="is not simulated", simulates=True)
        gpu = Hardware.load(parsed.hardware)
        check_options(config, gpu, parsed)
        lengths, image_tokens = lengths_of(config, parsed), image_tokens_of(parsed)
        config = with_local_models(config, with_weights=False)
        # A search ignores the layout of the configuration, which need not fit.
        checked = config.model_copy(update={"parallel": ParallelConfig()}) if parsed.search else config
        check_layout(checked, parsed.world_size)
        if lengths is None:
            check_sources(config)
        check_lengths(config)

        from mcore_rl.platform import initialize_platform

        initialize_platform()
        report(config, sequences_of(checked, lengths, image_tokens, parsed), gpu, parsed)


def report(config: TrainingConfig, sequences: Sequences, gpu: Hardware, arguments: Namespace) -> None:
    """Simulate and print the results."""
    from mcore_rl.simulation.search import (
        GENERATION,
        Assumptions,
        chosen_ranks,
        describe,
        describe_loading,
        search,
        simulate,
        simulate_loadings,
        table,
    )
    from mcore_rl.simulation.step import Implementation

    size = arguments.world_size
    implementation = Implementation(arguments.transformer_engine)
    assumed = Assumptions(implementation, arguments.expert_imbalance)
    if config.max_answer_length is not None:
        print(GENERATION)
    if isinstance(config, DPOConfig) and config.dpo.reference == "auto" and config.precomputes(epochs=1):
        print("assumed: the reference is computed before training (dpo.reference=auto)")
    say = partial(print, file=sys.stderr, flush=True)
    if arguments.search:
        found = search(config, size, sequences, gpu, arguments.workers, say, assumed)
        print("\n".join(table(found, assumed)))
        return
    ranks = chosen_ranks(config, size, arguments.ranks or "distinct")
    rows = f"{len(sequences.lengths):,} sequences of {sum(sequences.lengths):,} tokens"
    if of_images := sum(image.count for images in sequences.images for image in images):
        rows += f" ({of_images:,} of images)"
    print(f"{arguments.algorithm}, {size} processes, {config.model.dtype}, {rows} a step", flush=True)
    reports = simulate(config, size, ranks, sequences, arguments.workers, assumed, say)
    print("\n".join(describe(config, size, reports, gpu, assumed)))
    if arguments.load_from:
        loadings = simulate_loadings(config, size, ranks, arguments.load_from, arguments.workers, say)
        print("\n".join(describe_loading(loadings, arguments.load_from)))


def check_options(config: TrainingConfig, gpu: Hardware, arguments: Namespace) -> None:
    """Raise UserError for an invalid option, before any file is read."""
    from mcore_rl.simulation.search import chosen_ranks

    if config.model.dtype not in gpu.flops_per_second:
        raise UserError(f"--hardware {arguments.hardware}: has no peak for model.dtype={config.model.dtype}")
    if config.model.fp8 is not None:
        if config.model.dtype != "bfloat16" or "float8" not in gpu.flops_per_second:
            raise UserError("model.fp8: is estimated for model.dtype=bfloat16 on hardware with a peak of float8 only")
        if (recipe := config.model.fp8.recipe) not in gpu.fp8_recipes:
            known = ", ".join(gpu.fp8_recipes) or "no recipe (its fp8_recipes is empty)"
            raise UserError(f"model.fp8.recipe={recipe}: --hardware {arguments.hardware} computes {known}")
    if arguments.transformer_engine and config.model.dtype != "bfloat16":
        raise UserError("--transformer-engine: is estimated for bfloat16 only; set model.dtype=bfloat16")
    factor, ranks = arguments.expert_imbalance, config.parallel.expert_model_parallel_size
    if not (1 <= factor <= ranks or (arguments.search and factor >= 1)):
        raise UserError(
            f"--expert-imbalance {factor:g}: must be at least 1 and at most "
            f"parallel.expert_model_parallel_size={ranks}, the factor of a rank that gets all tokens"
        )
    for option, given in (("--load-from", arguments.load_from), ("--ranks", arguments.ranks)):
        if arguments.search and given is not None:
            raise UserError(f"{option}: needs a single layout; leave out --search")
    if arguments.ranks is not None:
        config.parallel.data_parallel_size(arguments.world_size)
        chosen_ranks(config, arguments.world_size, arguments.ranks)
    part = arguments.response_part
    if part is not None and arguments.lengths is None:
        raise UserError("--response-part: needs --lengths; without --lengths the data determine the responses")
    if part is not None and not 0 < part <= 1:
        raise UserError(f"--response-part {part}: must be a fraction of a sequence, above 0 and at most 1")


def lengths_of(config: TrainingConfig, arguments: Namespace) -> list[int] | None:
    """Return the lengths of --lengths; None if the lengths of the data are used.

    Raises:
        UserError: the option is not a list of lengths, or a length exceeds data.max_sequence_length.
    """
    if arguments.lengths is None:
        return None
    lengths = [whole_number(word) or 0 for word in arguments.lengths.split(",")]
    if min(lengths) < 2:
        raise UserError(f"--lengths {arguments.lengths[:80]}: write numbers of tokens, at least 2, separated by commas")
    if max(lengths) > config.data.max_sequence_length:
        raise UserError(
            f"--lengths: the longest is {max(lengths)}, more than "
            f"data.max_sequence_length={config.data.max_sequence_length}"
        )
    return lengths


def image_tokens_of(arguments: Namespace) -> list[int]:
    """Return the numbers of --image-tokens; [] without the option.

    Raises:
        UserError: the option is not a list of numbers, or is given without --lengths.
    """
    if arguments.image_tokens is None:
        return []
    if arguments.lengths is None:
        raise UserError("--image-tokens: needs --lengths; without --lengths the data determine the images")
    found = [whole_number(word) or 0 for word in arguments.image_tokens.split(",")]
    if min(found) < 1:
        raise UserError(f"--image-tokens {arguments.image_tokens[:80]}: write numbers of tokens, separated by commas")
    return found


def sequences_of(
    config: TrainingConfig, lengths: list[int] | None, image_tokens: list[int], arguments: Namespace
) -> Sequences:
    """Return sequences of these lengths, or of the first global batch with responses of maximum length. Models and data
    are checked first."""
    from mcore_rl.cli.dry_run import first_batch
    from mcore_rl.run.setup import check_models, check_weights, load_inputs
    from mcore_rl.simulation.sequences import sequences_of

    if lengths is None:
        sequences, _ = first_batch(config, load_inputs(config, arguments.world_size, needs_weights=False).train)
        return sequences
    check_weights(config, check_models(config), needed=False)
    if image_tokens and vision_model_config(config.model.path) is None:
        raise UserError(f"--image-tokens: the model in {config.model.path} reads no images; leave the option out")
    return sequences_of(config, lengths, arguments.response_part, image_tokens)
