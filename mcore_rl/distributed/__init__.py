"""Tensors across processes: collectives with gradients, layouts of packs, log-probabilities.

Letters for dimensions: B rows, S padded length of rows, T tokens in a pack, N sequences in a pack, V size of the
vocabulary, Vp = V / TP, H hidden size. In a batch, `logprobs[b, t]` scores `input_ids[b, t]`. The functions here return
only the *next-token* log-probabilities, the columns 1 … S − 1.
"""
