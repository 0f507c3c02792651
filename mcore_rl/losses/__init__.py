"""Losses: preference, policy gradient, distillation, and their sums over packs.

Each is normalised over the global batch, so its value does not depend on the parallel layout. This `__init__.py`
imports nothing, because the configuration imports `losses.options` without torch.
"""
