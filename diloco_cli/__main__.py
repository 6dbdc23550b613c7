"""`python -m diloco_cli` is `diloco`."""

from diloco_cli.cli.app import main

if __name__ == "__main__":
    main()
