"""One run: its plan, its directory, its loop."""
