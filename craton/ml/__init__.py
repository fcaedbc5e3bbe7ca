"""What learns: models, kernels, data and training. The only package that needs torch; importing this name does not."""
