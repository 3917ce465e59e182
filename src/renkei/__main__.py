"""``python -m renkei``."""

from renkei.cli.main import main

main()
