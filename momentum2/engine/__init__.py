"""Where documented imports of version 0.1 still lead, with a warning that names the new place."""
