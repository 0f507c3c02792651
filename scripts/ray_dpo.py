"""Run the training steps of train_dpo.py through the Ray controller, with the same numbers.

python scripts/ray_dpo.py CONFIG [--workers 2] [--steps 3] [section.key=value …]
"""

import argparse

from mcore_rl.cli.entry_point import Parser, count, exit_on_error
from mcore_rl.config import DPOConfig, load_config
from mcore_rl.data.readers import check_file
from mcore_rl.utils.console import quiet_libraries
from mcore_rl.utils.model_directory import check_model_directory


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--workers", type=count, default=2)
    parser.add_argument("--steps", type=count, default=3)
    arguments = parser.parse_intermixed_args()
    quiet_libraries()
    with exit_on_error():
        config = load_config(DPOConfig, arguments.config, arguments.overrides)
        config.parallel.data_parallel_size(arguments.workers)
        check_model_directory(config.model.path)
        for source in config.data.train_sources:
            check_file(source)
        train(config, arguments.workers, arguments.steps)


def train(config: DPOConfig, workers: int, steps: int) -> None:
    from mcore_rl.platform import initialize_platform

    initialize_platform()
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.data.batching import collate
    from mcore_rl.models.policy.ray_policy import Policy
    from mcore_rl.run.setup import load_inputs

    inputs = load_inputs(config, world_size=workers)
    whole_run = config.total_steps(len(inputs.train))
    policy = Policy(config, workers, total_steps=whole_run, rows_per_unit=2, keep_reference=True)
    loss_fn = build_loss(config)
    order, size = inputs.train.order(config.seed), config.batch.global_batch_size
    for step in range(steps):
        units = [inputs.train.units[i] for i in order.indices(step * size, size)]
        data = collate(units, inputs.tokenizer.pad_token_id)
        reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
        data["reference_policy_logprobs"] = reference.roll(-1, dims=1)
        metrics = policy.train(data, loss_fn)
        print(f"step {step + 1}  loss {metrics['loss']!r}  grad_norm {metrics['grad_norm']!r}")
    policy.shutdown()


if __name__ == "__main__":
    main()
