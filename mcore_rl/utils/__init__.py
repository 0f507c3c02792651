"""What every room may use: files on disk, models on disk and on the hub, the console, torchrun's environment."""
