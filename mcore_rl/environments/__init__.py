"""Environments, which judge responses: each gets a reward and, if the conversation continues, an observation.

Most judges run in separate processes; a reward model runs in the training processes.
"""
