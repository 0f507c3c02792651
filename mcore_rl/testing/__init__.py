"""Tools to run functions on several local processes, also with a shared GPU, and a comparison of parallel layouts."""
