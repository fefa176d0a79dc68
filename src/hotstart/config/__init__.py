"""What a server is told: frozen structs, one flag table, one cache root."""
