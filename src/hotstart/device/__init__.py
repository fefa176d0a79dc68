"""CPUs and GPUs without torch: what there is, who holds it, memory, copies and events."""
