"""What every test stands on: one thread, the same examples in every run, and Triton's interpreter
where there is no GPU."""

import contextlib
import os

import torch

# Kernels with several threads wait for whatever else this machine runs.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

with contextlib.suppress(ImportError):  # what runs on a GPU's machine does without
    from hypothesis import settings

    settings.register_profile("fixed", derandomize=True)
    settings.load_profile("fixed")
