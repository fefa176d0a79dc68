"""What a server is told: frozen dataclasses, one flag table, one cache root."""
