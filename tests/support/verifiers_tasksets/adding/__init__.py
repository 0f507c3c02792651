"""A taskset of verifiers: sums, with a tool that adds. It runs in the environment of verifiers."""

from adding.taskset import AddingTaskset

__all__ = ["AddingTaskset"]
