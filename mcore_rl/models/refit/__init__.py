"""Transfer of weights to inference engines. Imported inside the engines too."""
