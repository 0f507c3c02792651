"""Functions on several local processes, and the comparison of parallel layouts that runs on them."""
