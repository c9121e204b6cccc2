"""One thread per process: these tests are many small ones, and their numbers are compared."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
