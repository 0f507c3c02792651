"""Mixtures of experts: router, experts, and the layer with its dispatcher."""
