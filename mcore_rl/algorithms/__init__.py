"""Algorithms: a file with the step or the objective of each, and what they share: advantages, choice of the loss."""
