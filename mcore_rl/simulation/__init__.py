"""Simulation of a rank of a run of any size on a small machine: tensors without memory, collectives without peers.

The training code runs unchanged. The simulation counts the memory, operations and transfers that a real run would need.
"""
