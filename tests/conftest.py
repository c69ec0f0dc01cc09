"""One thread for every test: kernels with several wait for whatever else this machine runs."""

import torch

torch.set_num_threads(1)
