"""Tools to run functions on several local processes, and a comparison of parallel layouts that uses them."""
