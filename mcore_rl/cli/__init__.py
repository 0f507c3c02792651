"""The command line: the `mcore-rl` command and the programs behind the scripts."""
