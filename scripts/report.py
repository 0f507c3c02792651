"""One HTML file about runs: the same as `mcore-rl report RUN [RUN …] [--output FILE]`."""

from mcore_rl.cli.report import main

if __name__ == "__main__":
    main()
