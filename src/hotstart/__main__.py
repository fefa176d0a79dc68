"""``python -m hotstart``."""

from hotstart.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
