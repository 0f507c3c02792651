"""A job of the process that writes checkpoints; it returns the names of the modules that this process has imported."""

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass
class ModulesJob:
    path: str

    def run(self, _block, _say_written):
        Path(self.path).write_text(" ".join(sys.modules))
