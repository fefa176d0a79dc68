"""Writing a checkpoint anew: in shards of another size, in a layout for ranks, as Tensorizer files."""
