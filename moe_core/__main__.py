from moe_core.cli import main

raise SystemExit(main())
