"""What the bytes of a model mean: headers, index, small files, and which files count."""
