"""Environments: rewards, ends and observations; each sample is judged in a process that may fail."""
