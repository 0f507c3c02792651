"""Models that are used and not trained: the endpoint, conversations in the terminal, and evaluation."""
