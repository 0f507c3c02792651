"""The weights of a whole model: read, gathered, exported, sent, and their adapters."""
