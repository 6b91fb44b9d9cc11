"""Networks that other people trained, read as scores."""
