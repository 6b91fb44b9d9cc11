"""``python -m vkernel.explore``."""

if __name__ == "__main__":
    import typer

    from vkernel.cli.explore import explore

    typer.run(explore)
