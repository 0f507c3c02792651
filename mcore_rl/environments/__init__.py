"""Environments, which judge responses: each gets a reward, and perhaps an observation that continues the conversation.

Most judges run in separate processes; a reward model runs in the training processes.
"""
