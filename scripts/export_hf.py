"""Write a checkpoint's weights as a Hugging Face model directory.

    [torchrun --nproc-per-node N] scripts/export_hf.py CHECKPOINT DESTINATION [parallel.key=value …]

CHECKPOINT is a directory iter_NNNNNNN, or the one above it (the newest is taken). Whatever layout wrote
it, any layout may read it; one process unless overridden.
"""

import argparse
import os
from pathlib import Path

from mcore_rl.config import TrainingConfig, build_config, read_yaml
from mcore_rl.entry_point import leave, quiet_libraries
from mcore_rl.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    quiet_libraries()
    try:
        export(arguments.checkpoint, arguments.destination, arguments.overrides)
    except UserError as error:
        leave(2, str(error))


def export(source: Path, destination: Path, overrides: list[str]) -> None:
    from mcore_rl.algorithms.checkpointing import find_checkpoints
    from mcore_rl.models.megatron.hf_config import check_model_fits, load_hf_config
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    if destination.exists():
        raise UserError(f"{destination} exists already")
    newest = sorted(source.glob("iter_*"))[-1:] or [source]
    config = training_config(newest[0] / "config.yaml", [*overrides, f"checkpoint.resume={source}"])
    iteration = find_checkpoints(config)[0][0]
    config.parallel.data_parallel_size(int(os.environ.get("WORLD_SIZE", 1)))
    hf_config = load_hf_config(config.model.path, config.model.trust_remote_code)
    check_model_fits(hf_config, config.parallel, config.data.max_sequence_length)
    policy = MegatronPolicy(config)
    if problems := policy.verify_checkpoint(iteration):
        raise UserError(f"{iteration} is damaged: {'; '.join(problems)}")
    policy.load_weights(iteration)
    policy.export_hf(destination)
    if policy.is_writer:
        print(f"Hugging Face model: {destination}")
    policy.shutdown()


def training_config(path: Path, overrides: list[str]) -> TrainingConfig:
    """The configuration beside a checkpoint, without its layout and its algorithm's section."""
    kept = {key: value for key, value in read_yaml(path).items() if key in TrainingConfig.model_fields}
    kept.pop("parallel", None)
    return build_config(TrainingConfig, kept, overrides, origin=str(path))


if __name__ == "__main__":
    main()
