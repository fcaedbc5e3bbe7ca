"""The operations a decoder is made of. On CUDA they are fused Triton kernels, elsewhere and under torch.compile plain
PyTorch (`reference`), which is also what the tests compare them with."""

from craton.ml.kernels.attention import attention
from craton.ml.kernels.documents import Documents
from craton.ml.kernels.elementwise import add_norm, is_fused, split_and_rotate, swiglu, swiglu_backward
from craton.ml.kernels.matmuls import gated_linears, gated_mlp, linear, linears, scatter_linear
from craton.ml.kernels.past import Past
