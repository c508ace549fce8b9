"""`python -m dmq.cli` is the same as `dmq`."""

from dmq.cli import main

main()
