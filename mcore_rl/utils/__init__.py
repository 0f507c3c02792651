"""Utilities for all packages: files, models on disk and on the hub, the console, torchrun's environment."""
