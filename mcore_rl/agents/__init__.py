"""Agents: an endpoint for programs that call the policy as a model, their sessions, and their processes."""
