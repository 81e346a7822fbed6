"""``python -m yggdrax --config=configs/default.py --workdir=runs/default``."""

import sys

from yggdrax.experiment.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
