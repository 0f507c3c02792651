"""Environments. They judge responses: reward, end of the conversation, observation.

Judges run in separate processes.
"""
