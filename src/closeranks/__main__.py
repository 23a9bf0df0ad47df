"""``python -m closeranks``: the same as the ``closeranks`` command, for torchrun and srun."""

from closeranks.cli.main import main

if __name__ == "__main__":
    main()
