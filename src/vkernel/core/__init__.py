"""What every other package uses: errors, random streams, estimates, covariance operators, progress and files."""
