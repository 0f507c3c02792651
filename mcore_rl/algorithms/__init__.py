"""Algorithms: one file for each, with its training step or its objective."""
