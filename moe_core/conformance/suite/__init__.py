"""The suites for the backend that ``--moe-backend`` names; ``moe-core conformance`` runs them."""
