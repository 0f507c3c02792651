"""Rollouts: conversations of the policy with an environment, which are collected, judged and recorded."""
