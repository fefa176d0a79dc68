"""From files to weight stores: plans, readers, images and arenas."""
