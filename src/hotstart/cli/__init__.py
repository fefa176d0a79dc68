"""The commands; each imports what it needs once it is chosen."""
