"""What learns: models, kernels, data and training. The only package that needs torch; importing this name does not."""

from craton.ml.precisions import TRAINED_PRECISIONS

__all__ = ["TRAINED_PRECISIONS"]
