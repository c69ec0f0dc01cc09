"""What every test stands on: one thread, and Triton's interpreter where there is no GPU."""

import os

import torch

# Kernels with several threads wait for whatever else this machine runs.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
