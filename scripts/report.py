"""Write one HTML file about runs, as does `mcore-rl report RUN [RUN …] [--output FILE]`."""

from mcore_rl.cli.main import report

if __name__ == "__main__":
    report()
