"""Foundations of every other package: errors, checks, random streams, estimates, covariances, progress, files."""
