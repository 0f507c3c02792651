"""From files to microbatches: records, chat templates, the order of samples, packing."""
