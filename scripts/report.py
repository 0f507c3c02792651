"""Write one HTML file about runs, as does `mcore-rl report RUN [RUN …] [--output FILE]`."""

from mcore_rl.cli.report import main

if __name__ == "__main__":
    main()
