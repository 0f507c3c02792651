"""From a Hugging Face directory to the modules of this rank."""
