"""Tensors across processes: collectives with gradients, layouts of packs, log-probabilities.

Letters for dimensions: B rows, S padded length, T packed tokens, N packed sequences, V vocabulary,
Vp = V / TP, H hidden size. `logprobs[b, t]` scores `input_ids[b, t]`; the functions here return the
columns 1 … S − 1, the *next-token* log-probabilities.
"""
