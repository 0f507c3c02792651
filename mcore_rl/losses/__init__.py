"""Losses: preference, policy gradient, distillation, and their sums over packs.

`mcore_rl.algorithms.loss_functions` exports their public names; this `__init__.py` imports nothing.
"""
