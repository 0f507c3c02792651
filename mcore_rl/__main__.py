"""Makes `python -m mcore_rl` run the command `mcore-rl`."""

from mcore_rl.cli.main import main

if __name__ == "__main__":
    main()
