"""Check your configuration and data under many parallel layouts, on a small model of the same architecture.

    python scripts/verify_layouts.py CONFIG [key=value …] [--layouts tp=1,2 pp=1,2 cp=1,2 dp=1,2 ep=1,2 …]
        [--device cuda] [--dtype bfloat16] [--transformer-impl transformer_engine]

Runs on the CPU, also on machines with GPUs, unless --device=cuda is given. Processes that have no GPU of their own
share GPUs and communicate through host memory.

Prints the relative differences of each layout from one process. The exit status is 1 if a difference is larger than
rounding, and otherwise 4 if a layout was cut off by the time limit of five minutes for each layout.
With --dtype bfloat16, the differences are from one process in float32, and may be 1.5 times those of one process in
bfloat16 (3 times for a single parameter).
"""

import argparse
import sys
import tempfile
from pathlib import Path

from mcore_rl.testing.gpus import hide_gpus, no_gpu

if __name__ == "__main__":  # only the processes of the layouts use GPUs
    hide_gpus()

from mcore_rl.cli.entry_point import Parser, count, exit_on_error
from mcore_rl.cli.train import PROGRAMS, load_for
from mcore_rl.config import KTOConfig, ParallelConfig
from mcore_rl.config.algorithms import own_layouts
from mcore_rl.config.parallel import own_split, parse_layouts
from mcore_rl.data.readers import check_file
from mcore_rl.errors import UserError
from mcore_rl.testing.cluster.verdicts import NO_TIME_STATUS
from mcore_rl.utils.console import quiet_libraries
from mcore_rl.utils.model_directory import check_model_directory

DEFAULT_LAYOUTS = ["tp=1,2", "pp=1,2", "cp=1,2"]


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    arguments = parser.parse_intermixed_args()
    quiet_libraries()
    with exit_on_error():
        if arguments.device == "cuda" and (reason := no_gpu()):
            raise UserError(f"--device cuda: {reason}")
        config = load_for(arguments.algorithm, arguments.config, arguments.overrides)
        check_model_directory(config.model.path)
        for source in config.data.train_sources:
            check_file(source)
        layouts = [x for x in parse_layouts(arguments.layouts) if x.world_size <= arguments.max_processes]
        if not layouts:
            raise UserError(
                f"--max-processes {arguments.max_processes}: every layout needs more processes; use a larger number"
            )
        return verify(arguments, config, layouts)


def verify(arguments, config, layouts):
    from mcore_rl.platform import initialize_platform

    initialize_platform()
    import torch

    from mcore_rl.data.images import image_directory
    from mcore_rl.data.token_cache import default_directory
    from mcore_rl.data.tokenize import load_tokenizer
    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.model.hf_config import check_model_fits, hf_config_of, load_hf_config
    from mcore_rl.testing.layout_check import (
        TABLE_HEADER,
        check_layouts,
        fitting,
        invent_adapter,
        shrink_model,
        steps_table,
        table_row,
    )
    from mcore_rl.testing.processes import Start

    start = Start(arguments.device)
    config = with_layers(config, arguments.transformer_impl, start)
    hf_config = hf_config_of(config.model)
    check_model_fits(hf_config, ParallelConfig(), config.data.max_sequence_length)
    images = image_directory(config.data.cache_dir or default_directory())
    trusted, template = config.model.trust_remote_code, config.data.read_chat_template()
    tokenizer = load_tokenizer(config.model.path, trusted, template, images=images)
    data = invent_rollouts(config, tokenizer) if arguments.algorithm == "grpo" else first_batch(config, tokenizer)
    with tempfile.TemporaryDirectory() as directory:
        small = Path(directory) / "model"
        shrink_model(config.model, small, layouts, getattr(torch, arguments.dtype))
        changes = {"path": small, "dtype": arguments.dtype, "mtp_loss_scaling_factor": 0.0}
        model = config.model.model_copy(update=changes)
        if model.lora is not None:
            model = invent_adapter(model, Path(directory) / "adapter")
        config = config.model_copy(update={"model": model})
        reference = "one process" if arguments.dtype == "float32" else "one process in float32"
        print(f"{data.size} sequences of {', '.join(config.data.train_sources)}, relative differences from {reference}")
        try:
            family = family_of(load_hf_config(small, model.trust_remote_code, model.head))
            own = own_split(config.parallel, family.num_layers)
            if own and own.world_size > arguments.max_processes:
                raise UserError(f"needs {own.world_size} processes, more than --max-processes")
            layouts += [own] if own else []
        except UserError as error:
            print(f"left out: the configuration's own pipeline split: {error}")
        for key in own_layouts(config):
            print(f"not checked: {key}: every model has the layout of its row")
        # This process sees no GPU, so it may be unable to use Transformer Engine.
        layouts, refused = fitting(layouts, with_layers(config, "local"))
        for layout, reason in refused:
            print(f"left out: {layout}: {reason}")
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


def with_layers(config, implementation, start=None):
    """Return `config` with layers of this implementation, or unchanged if it is None.

    With `start`, check in a process of this kind that Transformer Engine can be used, if the configuration requires it.
    """
    from mcore_rl.platform import te_problem
    from mcore_rl.testing.processes import run_processes

    model = config.model
    if implementation is not None:
        model = model.model_copy(update={"transformer_impl": implementation})
    if start is not None and (model.transformer_impl == "transformer_engine" or model.fp8 is not None):
        (problem,) = run_processes(te_problem, world_size=1, start=start)
        if problem is not None:
            key = "model.transformer_impl=transformer_engine" if model.fp8 is None else "model.fp8"
            raise UserError(f"{key}: Transformer Engine {problem}")
    return config.model_copy(update={"model": model})


def first_batch(config, tokenizer):
    from mcore_rl.data.batching import collate
    from mcore_rl.data.datasets import dataset_loader

    dataset = dataset_loader(config)(config.data.train, tokenizer, config.data)
    count = min(config.batch.global_batch_size, len(dataset))
    indices = dataset.order(config.seed).indices(0, count)
    data = collate([dataset.units[i] for i in indices], tokenizer.pad_token_id)
    if isinstance(config, KTOConfig):
        import torch

        data["desirable"] = torch.tensor([dataset.is_desirable(i) for i in indices])
    return data


def invent_rollouts(config, tokenizer):
    """Return random responses to the first prompts, with random rewards; their content does not matter here."""
    import torch

    from mcore_rl.algorithms.advantages import EstimatorInputs, advantages_of
    from mcore_rl.algorithms.grpo import add_columns_of_loss
    from mcore_rl.data.datasets import load_prompt_dataset
    from mcore_rl.data.token_store import images_column
    from mcore_rl.rollouts.samples import Rollout, to_batch

    dataset = load_prompt_dataset(config.data.train, tokenizer, config.data, config.max_prompt_length)
    prompts, group = config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt
    generator, rollouts = torch.Generator().manual_seed(config.seed), []
    for index in dataset.order(config.seed).indices(0, prompts):
        for length in torch.randint(1, config.grpo.max_new_tokens + 1, (group,), generator=generator).tolist():
            rollout = Rollout.begin(index, len(rollouts), dataset.prompts[index])
            tokens = torch.randint(len(tokenizer), (length,), generator=generator).tolist()
            rollout.add_response(tokens, [0.0] * length)
            rollouts.append(rollout)
    rewards = torch.rand(prompts, group, generator=generator)
    data = to_batch(rollouts, tokenizer.pad_token_id)
    data.update(images_column([dataset.prompts[rollout.prompt].images for rollout in rollouts]))
    shape, names = data["token_mask"].shape, config.environment.rewards.values()
    more = EstimatorInputs(
        torch.rand(len(names), prompts, group, generator=generator),
        torch.tensor([reward.weight for reward in names]),
        torch.rand(shape, generator=generator),
        torch.rand(shape, generator=generator),
    )
    data["advantages"] = advantages_of(config.grpo, rewards, data["token_mask"], more=more)
    add_columns_of_loss(config.loss, data, rewards)
    return data


if __name__ == "__main__":
    sys.exit(main())
