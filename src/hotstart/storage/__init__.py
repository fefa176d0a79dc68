"""Where bytes come from: files, mounts, and what of them memory already holds."""
