"""Training: objectives, features, models, and ensembles of trained models."""
