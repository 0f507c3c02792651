"""Generation by servers of vLLM."""
