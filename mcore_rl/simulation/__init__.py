"""Simulate a rank of a run of any size on a small machine: shapes without memory, collectives without peers.

The code that trains runs unchanged; what it would have allocated, multiplied and sent is counted.
"""
