"""Is your parallel run right? Your configuration and data, on a shrunken clone of your model, under many layouts.

    python scripts/verify_layouts.py CONFIG [key=value …] [--layouts tp=1,2 pp=1,2 cp=1,2 dp=1,2 sp=0,1 packing=0,1]

Runs on the CPU whatever the machine. Prints each layout's relative differences from one process; exits
with 1 if one is larger than rounding.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""

from mcore_rl.config import DPOConfig, SFTConfig, load_config
from mcore_rl.entry_point import leave
from mcore_rl.errors import UserError
from mcore_rl.quiet import quiet_libraries

DEFAULT_LAYOUTS = ["tp=1,2", "pp=1,2", "cp=1,2"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="YAML file of train_dpo.py or train_sft.py")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--layouts", nargs="+", default=DEFAULT_LAYOUTS, metavar="KEY=1,2")
    parser.add_argument("--max-processes", type=int, default=8, help="leave out larger layouts")
    parser.add_argument("--algorithm", choices=("dpo", "sft"), default="dpo")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps before weights are compared")
    arguments = parser.parse_intermixed_args()
    quiet_libraries()
    try:
        return verify(arguments)
    except UserError as error:
        leave(2, str(error))


def verify(arguments: argparse.Namespace) -> int:
    from mcore_rl.data.batches import SampleOrder, collate
    from mcore_rl.data.records import load_preference_dataset, load_sft_dataset
    from mcore_rl.data.tokenize import load_tokenizer
    from mcore_rl.layout_check import TABLE_HEADER, check_layouts, parse_layouts, shrink_model, table_row

    is_dpo = arguments.algorithm == "dpo"
    config = load_config(DPOConfig if is_dpo else SFTConfig, arguments.config, arguments.overrides)
    layouts = [x for x in parse_layouts(arguments.layouts) if x.world_size <= arguments.max_processes]
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    load_dataset = load_preference_dataset if is_dpo else load_sft_dataset
    dataset = load_dataset(config.data.train, tokenizer, config.data)
    count = min(config.batch.global_batch_size, len(dataset))
    units = [dataset.units[i] for i in SampleOrder(len(dataset), config.seed).indices(0, count)]
    with tempfile.TemporaryDirectory() as directory:
        small = Path(directory) / "model"
        shrink_model(config.model.path, small, layouts)
        config = config.model_copy(
            update={"model": config.model.model_copy(update={"path": small, "dtype": "float32"})}
        )
        print(f"{count} records of {config.data.train}, relative differences from one process")
        print(TABLE_HEADER)
        right = True
        for layout, difference in check_layouts(
            config, collate(units, tokenizer.pad_token_id), layouts, arguments.steps
        ):
            print(table_row(layout, difference), flush=True)
            right &= difference.within()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
