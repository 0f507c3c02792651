"""Attention: one file for each kind, with its token mixer and its module."""
