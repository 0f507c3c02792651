"""Check a configuration under its layout, with one global batch of its data, on a small model of the same architecture.

    python examples/verify_a_layout.py configs/sft_cpu.yaml

One process and the processes of the layout run the same step on the CPU, and everything that a layout could change is
compared. `mcore-rl layouts` does the same for many layouts and all algorithms.
"""

import sys
import tempfile
from pathlib import Path

from mcore_rl.config import SFTConfig, load_config
from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.data.batching import collate
from mcore_rl.data.datasets import load_sft_dataset
from mcore_rl.data.tokenize import load_tokenizer
from mcore_rl.platform import initialize_platform
from mcore_rl.testing.layout_check import TABLE_HEADER, check_layouts, shrink_model, table_row
from mcore_rl.utils.console import quiet_libraries

LAYOUTS = [ParallelLayout(), ParallelLayout(tp=2, cp=2, sp=True)]


def main(path):
    quiet_libraries()
    initialize_platform()
    config = load_config(SFTConfig, path, ["batch.global_batch_size=8"])
    tokenizer = load_tokenizer(config.model.path)
    dataset = load_sft_dataset(config.data.train, tokenizer, config.data)
    data = collate([dataset.units[i] for i in range(8)], tokenizer.pad_token_id)
    with tempfile.TemporaryDirectory() as directory:
        shrink_model(config.model, Path(directory), LAYOUTS)
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": Path(directory)})})
        print(TABLE_HEADER)
        for layout, difference in check_layouts(config, data, LAYOUTS, steps=3):
            print(table_row(layout, difference))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
