"""Names of other libraries, for code that was written for them. The rest of the package does not call this code."""
