"""What a user starts: the `mcore-rl` command, and behind the scripts the same programs."""
