"""Rollouts: conversations of the policy with an environment. They are collected, judged and recorded."""
