"""Tests of layers that consist of Transformer Engine's modules.

They use the stand-in for Transformer Engine in `tests/support/te_stand_in`. Megatron looks for Transformer Engine when
it is imported. The tests therefore need a separate run with the stand-in on PYTHONPATH (`make test-te`). Other runs of
pytest do not collect them.
"""

import importlib.util

if importlib.util.find_spec("transformer_engine") is None:
    collect_ignore_glob = ["test_*.py"]
