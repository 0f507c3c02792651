"""The check of a cluster (`mcore-rl verify`): its plan, its inputs, and the programs that its ranks run."""
