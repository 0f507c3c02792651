"""Rollouts: conversations of the policy with an environment, collected, judged and recorded."""
