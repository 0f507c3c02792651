"""Tests that subclasses of Megatron's classes use none of their private names, except those that are listed."""

from private_names import EXCEPTIONS, private_names_of_megatron

from mcore_rl.testing.processes import run_processes


def test_private_names_of_megatron_are_listed():
    """Also those that a class replaces, and those of mixins. tests/te looks at the layers of Transformer Engine."""
    assert run_processes(private_names_of_megatron, False, world_size=1)[0] == EXCEPTIONS
