"""Model families: torch-free weight specs, and forwards built from slots."""
