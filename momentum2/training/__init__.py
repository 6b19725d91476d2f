"""Training: what a config resolves to, the loop, and what is watched meanwhile."""
