"""The losses. Public names are handed on by `mcore_rl.algorithms.loss_functions`; importing this imports nothing."""
