"""Write a small model and preference, SFT, unpaired and validation files made of real English text.

    python scripts/make_demo_data.py DIRECTORY

The text is the Python language reference that is part of every interpreter. The prompt of a record is a sentence, the
chosen response is the next sentence, and the rejected response is the next sentence with its words in random order. The
model is a Llama of four layers with random weights and a byte-level BPE tokenizer trained on the text.
"""

import argparse
from pathlib import Path

from mcore_rl.cli.entry_point import Parser, exit_on_error
from mcore_rl.testing.demo_data import write_demo_data
from mcore_rl.utils.console import quiet_libraries

if __name__ == "__main__":
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    quiet_libraries()
    with exit_on_error():
        directory = parser.parse_args().directory
        training, held_out = write_demo_data(directory)
        print(f"{directory}: model, {training} training and {held_out} validation records")
