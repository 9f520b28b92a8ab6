"""`python -m amp_patch` is the `amp-patch` command."""

from .cli import main

raise SystemExit(main())
