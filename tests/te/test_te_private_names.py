"""Test that layers of Transformer Engine use no private names of Megatron's or Transformer Engine's classes."""

from private_names import EXCEPTIONS, TE_EXCEPTIONS, private_names_of_megatron

from mcore_rl.testing.processes import run_processes


def test_private_names_of_layers_are_listed():
    assert run_processes(private_names_of_megatron, True, world_size=1)[0] == EXCEPTIONS | TE_EXCEPTIONS
