"""What responses meet: rewards, ends and observations, each sample judged in a process that may fail."""
