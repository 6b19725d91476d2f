"""What a representation is worth: kNN, linear and semi-supervised accuracy, and embeddings."""
