"""Other people's loaders: each hands over tensors by name, which go into stores of ours."""
