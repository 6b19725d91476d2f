"""A run directory: its files, lock, settings, checkpoints, metrics, results and encoder."""
