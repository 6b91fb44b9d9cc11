"""Studies whose trainings are too long for ``vkernel reproduce``; their results are stored here."""
