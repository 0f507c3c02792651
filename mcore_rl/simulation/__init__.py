"""Simulate a rank of a run of any size on a small machine: shapes without memory, collectives without peers.

The training code runs unchanged. The simulation counts the memory, operations and transfers that it would need.
"""
