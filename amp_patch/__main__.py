"""`python -m amp_patch` is the `amp-patch` command."""

from amp_patch.cli import main

raise SystemExit(main())
