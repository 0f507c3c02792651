"""Data from files to microbatches: records, chat templates, sample order, packing."""
