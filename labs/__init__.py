"""The attention-kernel labs. Importing this package decides where Triton kernels run."""

from labs._harness import runtime

runtime.setup()
