"""A page about runs, from the files that they leave: curves, samples, configuration, what to look at."""
