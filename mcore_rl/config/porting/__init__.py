"""Conversion of configurations of TRL, verl and NeMo RL."""
