"""Functions that run on several local processes, and the comparison of parallel layouts that uses them."""
