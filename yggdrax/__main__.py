"""``python -m yggdrax --config=configs/default.py --workdir=runs/default``."""

import sys

if __name__ == "__main__":
    try:
        # The import takes a second or two, in which an interrupt means no more than later.
        from yggdrax.experiment.cli import main
    except KeyboardInterrupt:
        print("interrupted before the start", file=sys.stderr)
        sys.exit(130)
    sys.exit(main(sys.argv))
