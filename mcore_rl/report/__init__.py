"""An HTML page about runs, from their output files: findings, curves, samples, configuration."""
