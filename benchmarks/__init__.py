"""Speed and accuracy of the exact engine, side by side with the alternatives; ``make bench``."""
