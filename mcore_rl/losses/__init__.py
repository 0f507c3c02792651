"""The losses. `mcore_rl.algorithms.loss_functions` exports their public names; this package imports nothing."""
