"""Generation of responses: sampling, interfaces of engines, the training model itself, servers of vLLM."""
